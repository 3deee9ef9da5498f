#include "fabric/verbs/path_endpoint.hpp"

#include "bootstrap/bytes.hpp"

namespace kvxfer::verbs {
namespace {

constexpr std::uint32_t k24Bits = 0xffffff;
constexpr std::uint32_t kMaxImmWindow = 1u << 20;

}  // namespace

std::string PathEndpoint::encode() const {
  return ByteWriter()
      .put(queue_pair)
      .put(packet_sequence)
      .put(imm_window)
      .put(lid)
      .put(mtu)
      .put(link_layer)
      .put(gid)
      .take();
}

std::optional<PathEndpoint> PathEndpoint::decode(std::string_view bytes) {
  ByteReader reader(bytes);
  PathEndpoint endpoint;
  endpoint.queue_pair = reader.get<std::uint32_t>();
  endpoint.packet_sequence = reader.get<std::uint32_t>();
  endpoint.imm_window = reader.get<std::uint32_t>();
  endpoint.lid = reader.get<std::uint16_t>();
  endpoint.mtu = reader.get<std::uint8_t>();
  endpoint.link_layer = reader.get<std::uint8_t>();
  endpoint.gid = reader.get<ibv_gid>();
  const bool sound = reader.finished() && endpoint.queue_pair <= k24Bits &&
                     endpoint.packet_sequence <= k24Bits && endpoint.imm_window <= kMaxImmWindow &&
                     endpoint.mtu >= IBV_MTU_256 && endpoint.mtu <= IBV_MTU_4096;
  if (!sound) return std::nullopt;
  return endpoint;
}

}  // namespace kvxfer::verbs
