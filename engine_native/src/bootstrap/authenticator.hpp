// HMAC-SHA256 with a shared key (OpenSSL).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvxfer {

using Mac = std::array<std::uint8_t, 32>;

Mac hmac_sha256(std::string_view key, std::string_view purpose, std::string_view data);

// Compares in constant time.
bool equal(const Mac& a, const Mac& b);

inline std::string_view view(const Mac& mac) {
  return {reinterpret_cast<const char*>(mac.data()), mac.size()};
}

}  // namespace kvxfer
