#include "engine_options.hpp"

#include <chrono>
#include <string>

#include "bootstrap/handshake.hpp"
#include "operation.hpp"

namespace kvxfer {

Result<void> check_options(const EngineOptions& options) {
  const auto bad = [](const std::string& what) { return Error{Errc::invalid_argument, what}; };
  if (options.cluster_key.size() < kMinClusterKeyBytes) {
    return bad("cluster_key has " + std::to_string(options.cluster_key.size()) +
               " bytes; it needs at least 16, e.g. the output of: openssl rand -hex 32");
  }
  const bool nics =
      options.verbs != FabricUse::never || options.ofi != FabricUse::never || options.more_nics;
  if (!options.local && !options.tcp && !nics) {
    return bad("no fabric is enabled; enable at least one of local, verbs, ofi and tcp");
  }
  if (options.name.size() > kMaxNameBytes) return bad("name is longer than 128 bytes");
  if (options.lanes < 1 || options.lanes > kMaxLanes) {
    return bad("lanes is " + std::to_string(options.lanes) + "; use 1 to 64");
  }
  if (options.traffic_class < 0 || options.traffic_class > 255) {
    return bad("traffic_class is " + std::to_string(options.traffic_class) + "; use 0 to 255");
  }
  if (options.gid_index < -1 || options.gid_index > 255) {
    return bad("gid_index is " + std::to_string(options.gid_index) + "; use 0 to 255, or -1");
  }
  if (options.pkey < 0 || options.pkey > 0xffff) {
    return bad("pkey is " + std::to_string(options.pkey) + "; use 1 to 65535, or 0");
  }
  if (options.path_mtu != 0 && (options.path_mtu < 256 || options.path_mtu > 4096)) {
    return bad("path_mtu is " + std::to_string(options.path_mtu) +
               "; use 256, 512, 1024, 2048 or 4096, or 0");
  }
  if (options.paths_per_nic_pair < 1 || options.paths_per_nic_pair > 8) {
    return bad("paths_per_nic_pair is " + std::to_string(options.paths_per_nic_pair) +
               "; use 1 to 8");
  }
  if (options.service_level < 0 || options.service_level > 7) {
    return bad("service_level is " + std::to_string(options.service_level) + "; use 0 to 7");
  }
  if (options.window_bytes < kMaxWriteBytes) {
    return bad("window_bytes is " + std::to_string(options.window_bytes) +
               "; it needs at least 1 MiB");
  }
  if (options.heartbeat_interval < std::chrono::milliseconds(1) ||
      options.heartbeat_interval > Duration(kMaxHeartbeatNs) ||
      options.peer_timeout < 2 * options.heartbeat_interval) {
    return bad("heartbeat_interval must be 1 ms to 60 s, and peer_timeout at least twice as long");
  }
  if (options.path_timeout < options.heartbeat_interval) {
    return bad("path_timeout must be at least heartbeat_interval, at which it is checked");
  }
  if (!options.thread && !options.cpus.empty()) {
    return bad("cpus says where the engine thread runs, and this engine has none; leave cpus out");
  }
  if (options.operation_timeout <= Duration::zero() || options.spin < Duration::zero()) {
    return bad("operation_timeout must be positive and spin not negative");
  }
  return {};
}

}  // namespace kvxfer
