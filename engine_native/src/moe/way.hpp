// How token rows get to one other rank, and from there.
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

// How much of a dispatch is here.
enum class Held : std::uint8_t {
  nothing,
  routes,  // and not yet all token rows
  whole,
  malformed,  // the rank breaks the protocol
};

// What a rank sends another one of a step.
struct Cargo {
  std::span<const std::int64_t> tokens;  // rising: whose rows
  // Of the other one's host: their messages go with it, and `tokens` has theirs.
  std::span<const std::uint32_t> neighbours;
};

// Within a call of its exchange.
class Way {
 public:
  virtual ~Way() = default;

  // --- sending. What goes lies in own memory, and its words say so.
  // Adds the operations that read own memory.
  virtual Result<void> post_dispatch(std::uint32_t slot, const Cargo& cargo,
                                     std::vector<OperationId>& operations) = 0;
  virtual Result<void> post_combine(std::uint32_t slot, std::uint32_t rows,
                                    std::vector<OperationId>& operations) = 0;

  // --- receiving
  virtual Held dispatched(std::uint32_t slot, std::uint64_t key) = 0;
  // Copies what is held of a dispatch: then `routes`. `nothing` if it is of another key by now.
  virtual Held read_routes(std::uint32_t slot, std::uint64_t key, Routes& routes) = 0;
  // By token, of the format Shape::token_row().
  virtual const std::byte* tokens(std::uint32_t slot) const = 0;
  // The same of combine rows: `whole`, `nothing` or `malformed`.
  virtual Held combined(std::uint32_t slot, std::uint64_t key, std::uint32_t rows) = 0;
  // By row of the routes to that rank, of the format Shape::combine_row().
  virtual const std::byte* combine_rows(std::uint32_t slot) const = 0;
  // After reading rows: whether they were those of the key all the time.
  virtual bool still(std::uint32_t slot, Direction direction, std::uint64_t key) const = 0;
};

}  // namespace kvxfer::moe
