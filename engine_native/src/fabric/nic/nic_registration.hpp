// A memory region as one NIC knows it. Any thread.
#pragma once

#include <cstdint>
#include <string_view>

#include "fabric/nic/remote_region.hpp"
#include "kvxfer/types.hpp"

namespace kvxfer {

// How a NIC reaches memory.
enum class MemoryWay : std::uint8_t {
  host,
  dmabuf,   // a GPU's, by a file that its driver gives out
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

  // Whether paths can open parts of it (NicDomain::max_window()).
  virtual bool takes_windows() const { return true; }
  virtual MemoryWay way() const { return MemoryWay::host; }
  // What this peer needs to write into the region. May take as long as registering did.
  virtual Result<RemoteKey> share(PeerId peer) = 0;
  // The peer is gone, and what it wrote with: close() need not think of it.
  virtual void unshare(PeerId peer) = 0;
  // After this nothing lands in the region, and it is no source. Idempotent. Where the NIC refuses,
  // the memory is within its reach still, and this may be tried again.
  virtual Result<void> close() = 0;
};

}  // namespace kvxfer
