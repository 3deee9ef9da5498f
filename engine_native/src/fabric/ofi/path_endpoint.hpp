// The data that the two ends of a path exchange.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "bootstrap/bytes.hpp"

namespace kvxfer::ofi {

struct PathEndpoint {
  std::uint64_t landing_address = 0;
  std::uint64_t landing_key = 0;
  std::uint64_t imm_window = 0;  // receives reserved here for the other end's immediates
  std::string address;           // the provider's format

  std::string encode() const {
    return ByteWriter().put(landing_address).put(landing_key).put(imm_window).text(address).take();
  }
  // Returns nullopt if the bytes are not a valid endpoint.
  static std::optional<PathEndpoint> decode(std::string_view bytes) {
    ByteReader reader(bytes);
    PathEndpoint endpoint;
    endpoint.landing_address = reader.get<std::uint64_t>();
    endpoint.landing_key = reader.get<std::uint64_t>();
    endpoint.imm_window = reader.get<std::uint64_t>();
    endpoint.address = reader.text();
    if (!reader.finished()) return std::nullopt;
    return endpoint;
  }
};

}  // namespace kvxfer::ofi
