#include "moe/kernels_avx2.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "moe/element.hpp"
#include "moe/quantised.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvxfer::moe::avx2 {

#if defined(__x86_64__)

namespace {

constexpr std::size_t kLanes = 8;
// Elements are loaded and stored in groups of four vectors.
constexpr std::size_t kGroup = 4 * kLanes;
using Group = __m256[4];

[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline void load_e4m3(const std::byte* from,
                                                                           __m256& low,
                                                                           __m256& high) {
  // Read as an f16 of the same sign, exponent and mantissa, it is 2^8 times too small.
  const __m256i bytes =
      _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i seven = _mm256_set1_epi16(0x7f);
  const __m256i magnitude = _mm256_and_si256(bytes, seven);
  const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(seven, bytes), 8);
  const __m256i nan =
      _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, seven), _mm256_set1_epi16(0x7c00));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(sign, nan), _mm256_slli_epi16(magnitude, 7));
  const __m256 factor = _mm256_set1_ps(256);
  low = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), factor);
  high = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), factor);
}

template <DType type>
[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline __m256 load_vector(
    const std::byte* from) {
  if constexpr (type == DType::f32) return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if constexpr (type == DType::f16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

template <DType type>
[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline void load(const std::byte* from,
                                                                      Group& to) {
  if constexpr (type == DType::f8_e4m3) {
    load_e4m3(from, to[0], to[1]);
    load_e4m3(from + 2 * kLanes, to[2], to[3]);
  } else {
    constexpr std::size_t stride = kLanes * size_of(type);
    to[0] = load_vector<type>(from);
    to[1] = load_vector<type>(from + stride);
    to[2] = load_vector<type>(from + 2 * stride);
    to[3] = load_vector<type>(from + 3 * stride);
  }
}

[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline bool has_nan(const Group& values) {
  const __m256 first = _mm256_cmp_ps(values[0], values[1], _CMP_UNORD_Q);
  const __m256 second = _mm256_cmp_ps(values[2], values[3], _CMP_UNORD_Q);
  return _mm256_movemask_ps(_mm256_or_ps(first, second)) != 0;
}

// Returns bits that are rounded to nearest, ties to even, once the low `shift` bits are cut off.
template <int shift>
[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline __m256i raised(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, shift), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32((1 << (shift - 1)) - 1)), odd);
}

// Returns the bf16 or e4m3 of each lane; no lane may be a NaN.
template <DType type>
[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline __m256i narrowed(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  if constexpr (type == DType::bf16) return _mm256_srli_epi32(raised<16>(value), 16);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  const __m256 magnitude =
      _mm256_min_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0F), value), _mm256_set1_ps(kLargestE4m3));
  // One unit in the last place of 2^14 is the least e4m3.
  const __m256i subnormal =
      _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(magnitude, _mm256_set1_ps(0x1p14F))),
                       _mm256_set1_epi32(0x46800000));
  const __m256i normal =
      _mm256_srli_epi32(_mm256_sub_epi32(raised<20>(magnitude), _mm256_set1_epi32(0x3c000000)), 20);
  const __m256 small = _mm256_cmp_ps(magnitude, _mm256_set1_ps(0x1p-6F), _CMP_LT_OQ);
  return _mm256_or_si256(sign, _mm256_blendv_epi8(normal, subnormal, _mm256_castps_si256(small)));
}

template <DType type>
[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline void store(std::byte* to,
                                                                       const Group& values) {
  if constexpr (type == DType::f32 || type == DType::f16) {
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i, to += kLanes * size_of(type)) {
      if constexpr (type == DType::f32) {
        _mm256_storeu_ps(reinterpret_cast<float*>(to), values[i]);
      } else {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                         _mm256_cvtps_ph(values[i], _MM_FROUND_TO_NEAREST_INT));
      }
    }
    return;
  } else {
    if (has_nan(values)) [[unlikely]] {
      alignas(32) float numbers[kGroup];
      for (std::size_t i = 0; i < 4; ++i) _mm256_store_ps(numbers + i * kLanes, values[i]);
      for (std::size_t i = 0; i < kGroup; ++i) {
        Element<type>::store(to + i * size_of(type), numbers[i]);
      }
      return;
    }
    // Packing takes halves of vectors in turn.
    const __m256i first = _mm256_packus_epi32(narrowed<type>(values[0]), narrowed<type>(values[1]));
    const __m256i second =
        _mm256_packus_epi32(narrowed<type>(values[2]), narrowed<type>(values[3]));
    auto* const vectors = reinterpret_cast<__m256i*>(to);
    if constexpr (type == DType::bf16) {
      _mm256_storeu_si256(vectors, _mm256_permute4x64_epi64(first, 0xd8));
      _mm256_storeu_si256(vectors + 1, _mm256_permute4x64_epi64(second, 0xd8));
    } else {
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      _mm256_storeu_si256(vectors,
                          _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order));
    }
  }
}

// Groups of a sum. Those of bf16 are split: elements of even number in the vectors 0 and 2, the
// others in 1 and 3, which takes the fewest instructions per row.
template <DType type>
constexpr bool kSplit = type == DType::bf16;

template <DType type>
[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline void load_summand(const std::byte* from,
                                                                              Group& to) {
  if constexpr (kSplit<type>) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
#pragma GCC unroll 2
    for (std::size_t i = 0; i < 4; i += 2, from += 32) {
      const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      to[i] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
      to[i + 1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, high));
    }
  } else {
    load<type>(from, to);
  }
}

template <DType to_type, DType from_type>
[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline void store_sum(std::byte* to,
                                                                           const Group& sums) {
  if constexpr (!kSplit<from_type>) {
    store<to_type>(to, sums);
    return;
  }
  if constexpr (to_type == DType::bf16) {
    if (!has_nan(sums)) [[likely]] {
#pragma GCC unroll 2
      for (std::size_t i = 0; i < 4; i += 2, to += 32) {
        const __m256i even = _mm256_srli_epi32(raised<16>(sums[i]), 16);
        const __m256i odd = raised<16>(sums[i + 1]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_blend_epi16(even, odd, 0xaa));
      }
      return;
    }
  }
  Group in_order;
#pragma GCC unroll 2
  for (std::size_t i = 0; i < 4; i += 2) {
    const __m256 low = _mm256_unpacklo_ps(sums[i], sums[i + 1]);
    const __m256 high = _mm256_unpackhi_ps(sums[i], sums[i + 1]);
    in_order[i] = _mm256_permute2f128_ps(low, high, 0x20);
    in_order[i + 1] = _mm256_permute2f128_ps(low, high, 0x31);
  }
  store<to_type>(to, in_order);
}

// Loads the last `n` < kGroup elements; zeros in the other lanes.
template <DType type>
[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline void load_part(const std::byte* from,
                                                                           std::size_t n,
                                                                           Group& to) {
  std::array<std::byte, kGroup * size_of(type)> padded{};
  std::memcpy(padded.data(), from, n * size_of(type));
  load<type>(padded.data(), to);
}

template <DType type>
[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline void store_part(std::byte* to,
                                                                            const Group& values,
                                                                            std::size_t n) {
  std::array<std::byte, kGroup * size_of(type)> padded{};
  store<type>(padded.data(), values);
  std::memcpy(to, padded.data(), n * size_of(type));
}

template <DType to_type, DType from_type>
[[gnu::target("avx2,fma,f16c")]] void convert(std::byte* to, const std::byte* from, std::size_t n) {
  Group values;
  std::size_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    load<from_type>(from + i * size_of(from_type), values);
    store<to_type>(to + i * size_of(to_type), values);
  }
  if (i < n) {
    load_part<from_type>(from + i * size_of(from_type), n - i, values);
    store_part<to_type>(to + i * size_of(to_type), values, n - i);
  }
}

[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline float largest_of(const Group& lanes) {
  const __m256 whole =
      _mm256_max_ps(_mm256_max_ps(lanes[0], lanes[1]), _mm256_max_ps(lanes[2], lanes[3]));
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(whole), _mm256_extractf128_ps(whole, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline void take_largest(Group& most,
                                                                              const Group& values) {
  const __m256 sign = _mm256_set1_ps(-0.0F);
  // max_ps returns its second operand if one is a NaN.
#pragma GCC unroll 4
  for (std::size_t v = 0; v < 4; ++v) {
    most[v] = _mm256_max_ps(_mm256_andnot_ps(sign, values[v]), most[v]);
  }
}

[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline void multiply(Group& values,
                                                                          __m256 factor) {
#pragma GCC unroll 4
  for (std::size_t v = 0; v < 4; ++v) values[v] = _mm256_mul_ps(values[v], factor);
}

[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline void clear(Group& values) {
#pragma GCC unroll 4
  for (std::size_t v = 0; v < 4; ++v) values[v] = _mm256_setzero_ps();
}

template <DType from_type>
[[gnu::target("avx2,fma,f16c")]] void quantise_block(std::byte* payload, float* scale,
                                                     const std::byte* from, std::size_t n) {
  constexpr std::size_t size = size_of(from_type);
  const std::size_t whole = n / kGroup * kGroup;
  Group values, most;
  clear(most);
  for (std::size_t i = 0; i < whole; i += kGroup) {
    load<from_type>(from + i * size, values);
    take_largest(most, values);
  }
  if (whole < n) {
    load_part<from_type>(from + whole * size, n - whole, values);
    take_largest(most, values);
  }
  *scale = scale_of(largest_of(most));

  const __m256 inverse = _mm256_set1_ps(1 / *scale);
  for (std::size_t i = 0; i < whole; i += kGroup) {
    load<from_type>(from + i * size, values);
    multiply(values, inverse);
    store<DType::f8_e4m3>(payload + i, values);
  }
  if (whole < n) {
    load_part<from_type>(from + whole * size, n - whole, values);
    multiply(values, inverse);
    store_part<DType::f8_e4m3>(payload + whole, values, n - whole);
  }
}

[[gnu::target("avx2,fma,f16c"), gnu::always_inline]] inline void add(Group& sums,
                                                                     const float& weight,
                                                                     const Group& values) {
  const __m256 factor = _mm256_broadcast_ss(&weight);
#pragma GCC unroll 4
  for (std::size_t v = 0; v < 4; ++v) sums[v] = _mm256_fmadd_ps(factor, values[v], sums[v]);
}

template <DType to_type, DType from_type>
[[gnu::target("avx2,fma,f16c")]] void weighted_sum(std::byte* to, std::span<const WeightedRow> rows,
                                                   std::size_t n) {
  constexpr std::size_t size = size_of(from_type);
  Group values, first, second;
  std::size_t column = 0;
  // Two groups at once: as many sums as the registers hold.
  for (; column + 2 * kGroup <= n; column += 2 * kGroup) {
    clear(first);
    clear(second);
    for (const WeightedRow& row : rows) {
      load_summand<from_type>(row.row + column * size, values);
      add(first, row.weight, values);
      load_summand<from_type>(row.row + (column + kGroup) * size, values);
      add(second, row.weight, values);
    }
    store_sum<to_type, from_type>(to + column * size_of(to_type), first);
    store_sum<to_type, from_type>(to + (column + kGroup) * size_of(to_type), second);
  }
  for (; column < n; column += kGroup) {
    const std::size_t part = std::min(kGroup, n - column);
    clear(first);
    for (const WeightedRow& row : rows) {
      load_part<from_type>(row.row + column * size, part, values);
      add(first, row.weight, values);
    }
    store_part<to_type>(to + column * size_of(to_type), first, part);
  }
}

}  // namespace

bool supported() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
         __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

[[gnu::target("avx2")]] void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::size_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    const auto low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
    const auto high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + 32));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at + 32), high);
  }
  if (at < bytes) std::memcpy(to + at, from + at, bytes - at);
}

void convert(std::byte* to, DType to_type, const std::byte* from, DType from_type, std::size_t n) {
  with_types(to_type, from_type, [&](auto a, auto b) { convert<a, b>(to, from, n); });
}

void quantise(std::byte* payload, float* scales, std::uint32_t block, const std::byte* from,
              DType from_type, std::size_t n) {
  with_type(from_type, [&](auto type) {
    for (std::size_t begin = 0; begin < n; begin += block) {
      quantise_block<type>(payload + begin, scales++, from + begin * size_of(type),
                           std::min<std::size_t>(block, n - begin));
    }
  });
}

void weighted_sum(std::byte* to, DType to_type, std::span<const WeightedRow> rows, DType from_type,
                  std::size_t n) {
  with_types(to_type, from_type, [&](auto a, auto b) { weighted_sum<a, b>(to, rows, n); });
}

#else

bool supported() { return false; }
void copy(std::byte*, const std::byte*, std::size_t) {}
void convert(std::byte*, DType, const std::byte*, DType, std::size_t) {}
void quantise(std::byte*, float*, std::uint32_t, const std::byte*, DType, std::size_t) {}
void weighted_sum(std::byte*, DType, std::span<const WeightedRow>, DType, std::size_t) {}

#endif

}  // namespace kvxfer::moe::avx2
