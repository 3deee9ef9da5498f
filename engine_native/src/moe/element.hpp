// An element type that is known at compile time, and the dispatch from one known at run time.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "moe/dtype.hpp"

namespace kvxfer::moe {

template <DType type>
struct Element {
  using Bits =
      std::conditional_t<size_of(type) == 4, std::uint32_t,
                         std::conditional_t<size_of(type) == 2, std::uint16_t, std::uint8_t>>;

  static float load(const std::byte* from) {
    Bits bits;
    std::memcpy(&bits, from, sizeof(bits));
    if constexpr (type == DType::f32) return std::bit_cast<float>(bits);
    if constexpr (type == DType::bf16) return f32_of_bf16(bits);
    if constexpr (type == DType::f16) return f32_of_f16(bits);
    if constexpr (type == DType::f8_e4m3) return f32_of_e4m3(bits);
  }

  static void store(std::byte* to, float value) {
    Bits bits;
    if constexpr (type == DType::f32) bits = std::bit_cast<Bits>(value);
    if constexpr (type == DType::bf16) bits = bf16_of_f32(value);
    if constexpr (type == DType::f16) bits = f16_of_f32(value);
    if constexpr (type == DType::f8_e4m3) bits = e4m3_of_f32(value);
    std::memcpy(to, &bits, sizeof(bits));
  }
};

// Calls `call` with std::integral_constant<DType, type>.
template <class Call>
void with_type(DType type, Call&& call) {
  switch (type) {
    case DType::f32:
      return call(std::integral_constant<DType, DType::f32>());
    case DType::bf16:
      return call(std::integral_constant<DType, DType::bf16>());
    case DType::f16:
      return call(std::integral_constant<DType, DType::f16>());
    case DType::f8_e4m3:
      return call(std::integral_constant<DType, DType::f8_e4m3>());
  }
}

// The same for two types.
template <class Call>
void with_types(DType first, DType second, Call&& call) {
  with_type(first, [&](auto a) { with_type(second, [&](auto b) { call(a, b); }); });
}

}  // namespace kvxfer::moe
