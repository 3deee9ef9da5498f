// The kernels for x86-64 processors that have AVX2, FMA and F16C; elsewhere nothing calls them.
#pragma once

#include "moe/kernels.hpp"

namespace kvxfer::moe::avx2 {

bool supported();

void copy(std::byte* to, const std::byte* from, std::size_t bytes);
void convert(std::byte* to, DType to_type, const std::byte* from, DType from_type, std::size_t n);
void quantise(std::byte* payload, float* scales, std::uint32_t block, const std::byte* from,
              DType from_type, std::size_t n);
void weighted_sum(std::byte* to, DType to_type, std::span<const WeightedRow> rows, DType from_type,
                  std::size_t n);

}  // namespace kvxfer::moe::avx2
