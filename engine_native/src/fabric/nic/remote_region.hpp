// What a writer knows of a peer's memory region, beyond its descriptor.
#pragma once

#include <cstdint>
#include <vector>

namespace kvxfer {

// Where a region begins for one NIC of its owner, and the permission to write there.
struct RemoteKey {
  std::uint64_t address = 0;
  std::uint64_t rkey = 0;
  bool valid = false;
};

struct RemoteRegion {
  std::uint64_t length = 0;
  std::vector<RemoteKey> keys;  // by the peer's NIC numbers
};

}  // namespace kvxfer
