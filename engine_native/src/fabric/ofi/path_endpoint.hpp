// What two ends of a path tell each other.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvxfer::ofi {

struct PathEndpoint {
  std::uint64_t token = 0;
  std::uint64_t landing_address = 0;
  std::uint64_t landing_key = 0;
  std::uint64_t imm_window = 0;  // receives reserved here for the other end's immediates
  std::string address;           // the provider's

  std::string encode() const;
  // Empty if the bytes are none.
  static std::optional<PathEndpoint> decode(std::string_view bytes);
};

}  // namespace kvxfer::ofi
