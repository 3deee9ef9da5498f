// The data that the two ends of a path exchange to connect their queue pairs.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvxfer::verbs {

struct PathEndpoint {
  std::uint32_t queue_pair = 0;
  std::uint32_t packet_sequence = 0;  // number of the first packet sent from here
  std::uint32_t imm_window = 0;       // receives reserved here for the other end's immediates
  std::uint16_t lid = 0;
  std::uint8_t mtu = 0;  // enum ibv_mtu
  std::uint8_t link_layer = 0;
  ibv_gid gid{};

  std::string encode() const;
  // Returns nullopt if the bytes are not a valid endpoint.
  static std::optional<PathEndpoint> decode(std::string_view bytes);
};

}  // namespace kvxfer::verbs
