// The registration of a memory region with one NIC. Any thread.
#pragma once

#include <cstdint>
#include <string_view>

#include "fabric/nic/remote_region.hpp"
#include "kvxfer/types.hpp"

namespace kvxfer {

// The way in which a NIC reaches memory.
enum class MemoryWay : std::uint8_t {
  host,
  dmabuf,   // a GPU's, by a file of its driver
  peermem,  // a GPU's, by its address: the kernel module nvidia-peermem
};

constexpr std::string_view name_of(MemoryWay way) {
  switch (way) {
    case MemoryWay::dmabuf:
      return "dmabuf";
    case MemoryWay::peermem:
      return "peermem";
    case MemoryWay::host:
      break;
  }
  return "host";
}

class NicRegistration {
 public:
  virtual ~NicRegistration() = default;

  // True if paths can open parts of the region (NicDomain::max_window()).
  virtual bool takes_windows() const { return true; }
  virtual MemoryWay way() const { return MemoryWay::host; }
  // Returns the key that this peer needs to write into the region. May take as long as registering
  // did.
  virtual Result<RemoteKey> share(PeerId peer) = 0;
  // Forgets a peer that is gone, and its keys, so that close() need not consider them.
  virtual void unshare(PeerId peer) = 0;
  // Unregisters the region: nothing lands in it any more, and it is no source. Idempotent. If the
  // NIC refuses, it can still access the memory, and this may be tried again.
  virtual Result<void> close() = 0;
};

}  // namespace kvxfer
