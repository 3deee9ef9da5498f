// The writer's knowledge of a peer's memory region, beyond its descriptor.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "kvxfer/types.hpp"

namespace kvxfer {

using PathId = std::uint32_t;  // unique in a session; chosen by the initiator

// The address of a region for one NIC of its owner, and the permission to write there.
struct RemoteKey {
  std::uint64_t address = 0;
  std::uint64_t rkey = 0;
  bool valid = false;
};

struct RemoteRegion {
  std::uint64_t length = 0;
  std::vector<RemoteKey> keys;  // indexed by the peer's NIC numbers
  // The only immediate with which a grant is valid, until its counter is released; 0 if this is no
  // grant.
  Imm imm = 0;
  // True for a grant to NICs with memory windows, which open one by one, each for one path.
  bool windowed = false;
  std::uint32_t opening = 0;  // windows that will open, as far as the owner knows
  std::unordered_map<PathId, RemoteKey> windows;

  // Returns null while the path has no permission.
  const RemoteKey* key(PathId path, std::uint32_t nic) const {
    if (nic < keys.size() && keys[nic].valid) return &keys[nic];
    const auto window = windows.find(path);
    return window == windows.end() ? nullptr : &window->second;
  }
};

}  // namespace kvxfer
