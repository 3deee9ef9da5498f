#include "fabric/ofi/path_endpoint.hpp"

#include "bootstrap/bytes.hpp"

namespace kvxfer::ofi {

std::string PathEndpoint::encode() const {
  return ByteWriter()
      .put(token)
      .put(landing_address)
      .put(landing_key)
      .put(imm_window)
      .text(address)
      .take();
}

std::optional<PathEndpoint> PathEndpoint::decode(std::string_view bytes) {
  ByteReader reader(bytes);
  PathEndpoint endpoint;
  endpoint.token = reader.get<std::uint64_t>();
  endpoint.landing_address = reader.get<std::uint64_t>();
  endpoint.landing_key = reader.get<std::uint64_t>();
  endpoint.imm_window = reader.get<std::uint64_t>();
  endpoint.address = reader.text();
  if (!reader.finished()) return std::nullopt;
  return endpoint;
}

}  // namespace kvxfer::ofi
