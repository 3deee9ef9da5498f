#include "moe/kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "fabric/local/page_copy.hpp"
#include "moe/element.hpp"
#include "moe/kernels_avx2.hpp"
#include "moe/quantised.hpp"

namespace kvxfer::moe {
namespace portable {
namespace {

template <DType to_type, DType from_type>
void convert(std::byte* to, const std::byte* from, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    Element<to_type>::store(to + i * size_of(to_type),
                            Element<from_type>::load(from + i * size_of(from_type)));
  }
}

template <DType from_type>
void quantise(std::byte* payload, float* scales, std::size_t block, const std::byte* from,
              std::size_t n) {
  const auto load = [from](std::size_t i) {
    return Element<from_type>::load(from + i * size_of(from_type));
  };
  for (std::size_t begin = 0; begin < n; begin += block) {
    const std::size_t end = std::min(n, begin + block);
    float largest = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const float magnitude = std::abs(load(i));
      if (magnitude > largest) largest = magnitude;
    }
    const float scale = scale_of(largest);
    const float inverse = 1 / scale;
    for (std::size_t i = begin; i < end; ++i) {
      Element<DType::f8_e4m3>::store(payload + i, load(i) * inverse);
    }
    *scales++ = scale;
  }
}

template <DType to_type, DType from_type>
void weighted_sum(std::byte* to, std::span<const WeightedRow> rows, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    float sum = 0;
    for (const WeightedRow& row : rows) {
      sum = std::fma(row.weight, Element<from_type>::load(row.row + i * size_of(from_type)), sum);
    }
    Element<to_type>::store(to + i * size_of(to_type), sum);
  }
}

}  // namespace
}  // namespace portable

namespace {

constexpr std::size_t kRepFrom = 2048;

}  // namespace

Simd best_simd() {
  static const Simd best = avx2::supported() ? Simd::avx2 : Simd::portable;
  return best;
}

void convert(std::byte* to, DType to_type, const std::byte* from, DType from_type, std::size_t n,
             Simd simd) {
  if (to_type == from_type) return copy(to, from, n * size_of(to_type));
  if (simd == Simd::avx2) return avx2::convert(to, to_type, from, from_type, n);
  with_types(to_type, from_type, [&](auto a, auto b) { portable::convert<a, b>(to, from, n); });
}

void quantise(std::byte* payload, float* scales, std::uint32_t block, const std::byte* from,
              DType from_type, std::size_t n, Simd simd) {
  if (simd == Simd::avx2) return avx2::quantise(payload, scales, block, from, from_type, n);
  with_type(from_type,
            [&](auto type) { portable::quantise<type>(payload, scales, block, from, n); });
}

void copy(std::byte* to, const std::byte* from, std::size_t bytes, Stores stores) {
  if (bytes == 0) return;
  if (stores == Stores::cached) {
    // A long memcpy may be a `rep movsb`, which some processors do at a fifth of the speed if
    // `to` lies a few bytes behind `from` within a page, as malloc() places large buffers.
    if (bytes >= kRepFrom && best_simd() == Simd::avx2) return avx2::copy(to, from, bytes);
    std::memcpy(to, from, bytes);
    return;
  }
  const local::PageCopy whole{from, to, bytes};
  local::copy_pages({&whole, 1});
}

void weighted_sum(std::byte* to, DType to_type, std::span<const WeightedRow> rows, DType from_type,
                  std::size_t n, Simd simd) {
  if (simd == Simd::avx2) return avx2::weighted_sum(to, to_type, rows, from_type, n);
  with_types(to_type, from_type,
             [&](auto a, auto b) { portable::weighted_sum<a, b>(to, rows, n); });
}

}  // namespace kvxfer::moe
