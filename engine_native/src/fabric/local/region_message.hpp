// What the unix socket of a local path carries after the rendezvous.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

namespace kvxfer::local {

struct RegionMessage {
  // share: comes with the region's memfd.
  enum class Kind : std::uint32_t { share = 1, forget = 2 };
  Kind kind;
  std::uint32_t number;
  std::uint64_t size;

  std::string_view bytes() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
  static std::optional<RegionMessage> parse(std::string_view bytes) {
    RegionMessage message;
    if (bytes.size() != sizeof message) return std::nullopt;
    std::memcpy(&message, bytes.data(), sizeof message);
    if (message.kind != Kind::share && message.kind != Kind::forget) return std::nullopt;
    return message;
  }
};
static_assert(sizeof(RegionMessage) == 16);

}  // namespace kvxfer::local
