// Operations on the elements of token rows, on the CPU.
//
// Rows need no alignment. Both instruction sets give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "moe/dtype.hpp"

namespace kvxfer::moe {

enum class Simd : std::uint8_t {
  portable,
  avx2,  // with FMA and F16C
};
// Returns the best instruction set of this processor.
Simd best_simd();

// Converts `n` elements. The ranges must not overlap.
void convert(std::byte* to, DType to_type, const std::byte* from, DType from_type, std::size_t n,
             Simd simd = best_simd());

// Converts to e4m3 with one scale for each `block` elements (the last block may be shorter): max|x|
// / 448, and 1 for a block of zeros. x is about payload * scale. A NaN stays one and does not
// affect the scale; an infinity counts as the largest f32.
void quantise(std::byte* payload, float* scales, std::uint32_t block, const std::byte* from,
              DType from_type, std::size_t n, Simd simd = best_simd());

enum class Stores : std::uint8_t {
  cached,
  streamed,  // past the caches: faster if copies have kStreamFrom bytes or more together
};
inline constexpr std::size_t kStreamFrom = std::size_t{8} << 20;

// Copies; the ranges must not overlap. Others see the bytes before anything that is stored later.
void copy(std::byte* to, const std::byte* from, std::size_t bytes, Stores stores = Stores::cached);

struct WeightedRow {
  const std::byte* row;
  float weight;
};

// Writes the sum of weight * row over `rows`, each of `n` elements: fused multiply-adds in fp32, in
// the order of `rows`, then one rounding to `to_type`. No rows: zeros.
void weighted_sum(std::byte* to, DType to_type, std::span<const WeightedRow> rows, DType from_type,
                  std::size_t n, Simd simd = best_simd());

}  // namespace kvxfer::moe
