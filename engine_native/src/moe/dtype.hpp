// The element types of token rows, and the conversion of one element.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvxfer::moe {

// f8_e4m3 is the finite kind (OCP "E4M3FN"): bias 7, no infinity, NaN is 0x7f and 0xff.
enum class DType : std::uint8_t { f32, bf16, f16, f8_e4m3 };

constexpr std::size_t size_of(DType type) {
  switch (type) {
    case DType::f32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::f8_e4m3:
      break;
  }
  return 1;
}

constexpr const char* name_of(DType type) {
  switch (type) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::f8_e4m3:
      break;
  }
  return "f8_e4m3";
}

inline constexpr float kLargestE4m3 = 448.0F;

// Narrowing rounds to nearest, ties to even. A NaN stays a NaN of its sign.

constexpr float f32_of_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

constexpr std::uint16_t bf16_of_f32(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
  const std::uint32_t rounded = nan ? bits | 0x400000U : bits + 0x7fffU + (bits >> 16 & 1U);
  return static_cast<std::uint16_t>(rounded >> 16);
}

constexpr float f32_of_f16(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t magnitude = bits & 0x7fffU;
  if (magnitude > 0x7c00U) {  // quiet, as F16C makes it
    return std::bit_cast<float>(sign | 0x7fc00000U | magnitude << 13);
  }
  if (magnitude == 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U);
  if (magnitude >= 0x400U) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000U));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24F;
  return sign != 0 ? -subnormal : subnormal;
}

// Returns an infinity beyond the largest f16.
constexpr std::uint16_t f16_of_f32(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  std::uint32_t half = 0;
  if (magnitude > 0x7f800000U) {
    half = 0x7e00U | (magnitude >> 13 & 0x3ffU);
  } else if (magnitude >= 0x47800000U) {  // 65536
    half = 0x7c00U;
  } else if (magnitude >= 0x38800000U) {  // 2^-14, the least normal one
    half = (magnitude - 0x38000000U + 0xfffU + (magnitude >> 13 & 1U)) >> 13;
  } else {  // one unit in the last place of 0.5 is the least f16
    const auto sum = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F);
    half = sum - 0x3f000000U;
  }
  return static_cast<std::uint16_t>(sign | half);
}

constexpr float f32_of_e4m3(std::uint8_t bits) {
  const std::uint32_t sign = (bits & 0x80U) << 24;
  const std::uint32_t magnitude = bits & 0x7fU;
  if (magnitude == 0x7fU) return std::bit_cast<float>(sign | 0x7ff00000U);
  if (magnitude >= 8U) return std::bit_cast<float>(sign | ((magnitude << 20) + 0x3c000000U));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-9F;
  return sign != 0 ? -subnormal : subnormal;
}

// Returns kLargestE4m3 of the same sign for values beyond it, infinities included.
constexpr std::uint8_t e4m3_of_f32(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 24 & 0x80U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  std::uint32_t eighth = 0;
  if (magnitude > 0x7f800000U) {
    eighth = 0x7fU;
  } else if (magnitude >= 0x43e00000U) {  // 448
    eighth = 0x7eU;
  } else if (magnitude >= 0x3c800000U) {  // 2^-6, the least normal one
    eighth = (magnitude - 0x3c000000U + 0x7ffffU + (magnitude >> 20 & 1U)) >> 20;
  } else {  // one unit in the last place of 2^14 is the least e4m3
    const auto sum = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14F);
    eighth = sum - 0x46800000U;
  }
  return static_cast<std::uint8_t>(sign | eighth);
}

}  // namespace kvxfer::moe
