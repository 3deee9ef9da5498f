// The shape of an exchange of token rows, and a view of its ranks.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/error.hpp"
#include "moe/dtype.hpp"
#include "moe/row_format.hpp"

namespace kvxfer::moe {

// Equal at all ranks, except for `rank`.
struct Shape {
  std::uint32_t ranks = 0;                   // in the group at its start
  std::uint32_t rank = 0;                    // this one
  std::uint32_t experts = 0;                 // logical experts, which the router chooses
  std::vector<std::uint32_t> local_experts;  // physical experts of each rank
  std::uint32_t top_k = 0;
  std::uint32_t hidden = 0;
  std::uint32_t max_tokens = 0;  // per rank and step
  std::uint32_t slots = 2;       // steps that may be under way at once
  DType input = DType::bf16;     // x of dispatch_send()
  // The dtype on the wire, and as placed. The sender quantises to f8_e4m3 with a scale_block; if
  // the input is f8_e4m3, it passes on the caller's scales.
  DType wire = DType::bf16;
  DType combine = DType::bf16;  // y of combine_send(), and the way back
  DType output = DType::bf16;   // out of combine()
  std::uint32_t scale_block = 0;

  RowFormat token_row() const { return {wire, hidden, scale_block}; }
  RowFormat combine_row() const { return {combine, hidden, 0}; }
  // The maximum number of combine rows of one rank for all others.
  std::size_t combine_rows() const { return std::size_t{ranks} * max_tokens; }
  // The maximum number of entries of one token at this rank.
  std::uint32_t entries_per_row(std::uint32_t at) const {
    return top_k < local_experts[at] ? top_k : local_experts[at];
  }
};

inline Error invalid_argument(std::string text) {
  return {Errc::invalid_argument, std::move(text)};
}

// Fails with invalid-argument that names the first member that is wrong, and what is allowed.
Result<void> check(const Shape& shape);
// Returns a digest of all that must be equal at the ranks.
std::uint64_t digest(const Shape& shape);

// A numbered membership.
struct View {
  std::uint64_t number = 0;
  std::vector<bool> alive;  // by rank
  // By logical expert: rank << 32 | local expert; -1: no live replica.
  std::vector<std::int64_t> table;
};

inline constexpr std::uint64_t kMaxView = (std::uint64_t{1} << 24) - 1;
inline constexpr std::uint64_t kMaxStep = (std::uint64_t{1} << 40) - 2;

// Returns the key that names a step in a view; never 0.
constexpr std::uint64_t key_of(std::uint64_t view, std::uint64_t step) {
  return view << 40 | (step + 1);
}

}  // namespace kvxfer::moe
