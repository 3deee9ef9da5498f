// The format of a token row in memory: its elements, then the scales of their blocks, then padding.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/dtype.hpp"

namespace kvxfer::moe {

struct RowFormat {
  static constexpr std::size_t kAlignment = 64;

  DType dtype;
  std::uint32_t hidden;           // elements
  std::uint32_t scale_block = 0;  // elements with one scale; the last block may be shorter; 0: none

  constexpr std::size_t payload_bytes() const { return hidden * size_of(dtype); }
  constexpr std::size_t scales() const {
    return scale_block == 0 ? 0 : (std::size_t{hidden} + scale_block - 1) / scale_block;
  }
  // The scales are f32, and begin at scales_offset().
  constexpr std::size_t scale_bytes() const { return scales() * sizeof(float); }
  constexpr std::size_t scales_offset() const {
    return (payload_bytes() + sizeof(float) - 1) / sizeof(float) * sizeof(float);
  }
  // The bytes from the beginning of one row to that of the next.
  constexpr std::size_t bytes() const {
    return (scales_offset() + scale_bytes() + kAlignment - 1) / kAlignment * kAlignment;
  }

  bool operator==(const RowFormat&) const = default;
};

}  // namespace kvxfer::moe
