// The way of token rows to one other rank, and from there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvxfer/error.hpp"
#include "kvxfer/types.hpp"
#include "moe/memory_layout.hpp"
#include "moe/routing.hpp"

namespace kvxfer::moe {

// The part of a dispatch that is here.
enum class Held : std::uint8_t {
  nothing,
  routes,  // but not yet all token rows
  whole,
  malformed,  // the rank breaks the protocol
};

// The rows of a step that a rank sends to another one.
struct Cargo {
  std::span<const std::int64_t> tokens;  // tokens of the rows, rising
  // Ranks of the other one's host: their messages go along, and `tokens` has theirs, too.
  std::span<const std::uint32_t> neighbours;
};

// A way; called only within a call of its exchange.
class Way {
 public:
  virtual ~Way() = default;

  // --- sending. The rows lie in own memory, and its words say so.
  // Appends to `operations` those that read own memory.
  virtual Result<void> post_dispatch(std::uint32_t slot, const Cargo& cargo,
                                     std::vector<OperationId>& operations) = 0;
  virtual Result<void> post_combine(std::uint32_t slot, std::uint32_t rows,
                                    std::vector<OperationId>& operations) = 0;

  // --- receiving
  virtual Held dispatched(std::uint32_t slot, std::uint64_t key) = 0;
  // Copies the routes of a held dispatch. Returns `routes`, or `nothing` if its key has changed.
  virtual Held read_routes(std::uint32_t slot, std::uint64_t key, Routes& routes) = 0;
  // The rows by token, of the format Shape::token_row().
  virtual const std::byte* tokens(std::uint32_t slot) const = 0;
  // Returns `whole`, `nothing` or `malformed` for combine rows.
  virtual Held combined(std::uint32_t slot, std::uint64_t key, std::uint32_t rows) = 0;
  // The rows by row of the routes to that rank, of the format Shape::combine_row().
  virtual const std::byte* combine_rows(std::uint32_t slot) const = 0;
  // True if the rows were those of the key all the time. Called after they were read.
  virtual bool still(std::uint32_t slot, Direction direction, std::uint64_t key) const = 0;
};

}  // namespace kvxfer::moe
