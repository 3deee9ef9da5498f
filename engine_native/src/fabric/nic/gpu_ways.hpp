// How one NIC reaches memory of each GPU, found out by trying: registering it may succeed where
// nothing written ever arrives, as without peer-to-peer support of the kernel or behind an IOMMU.
// Any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/gpus.hpp"
#include "fabric/nic/nic_registration.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class MemoryRegion;

// A NIC that writes to itself. One thread.
class NicLoop {
 public:
  virtual ~NicLoop() = default;
  // peermem: by the GPU's address. Fails with fabric-unavailable where the NIC does not take the
  // memory this way.
  virtual Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion& region,
                                                                   MemoryWay way) = 0;
  // From an address of memory that is registered here. Returns once the NIC says that the bytes
  // are there.
  virtual Result<void> write(const NicRegistration& source, std::uint64_t from, const RemoteKey& to,
                             std::uint32_t bytes) = 0;

 protected:
  // For a write: within one NIC it takes microseconds, after the milliseconds of a first contact.
  static constexpr std::uint64_t kPatienceNs = 1'000'000'000;
  static constexpr auto kPause = std::chrono::microseconds(20);
  static Error broken(std::string why) { return {Errc::fabric_unavailable, std::move(why)}; }
  [[no_unique_address]] ThreadOwner thread_;
};

class GpuWays {
 public:
  struct Nic {
    std::string name;
    std::string by_address;  // what its second way is called
    std::function<bool()> is_up;
    std::function<Result<std::unique_ptr<NicLoop>>()> open_loop;
  };

  explicit GpuWays(Nic nic) : nic_(std::move(nic)) {}

  // dmabuf if it works, else peermem; fails with fabric-unavailable and what is wrong with each,
  // and with other codes where it could not be tried, nic-lost where the link is down or the NIC
  // does not reach memory of the host either: then it is tried again the next time. Some
  // milliseconds, the first time.
  Result<MemoryWay> find(const std::shared_ptr<cuda::Gpu>& gpu);

 private:
  Nic nic_;
  std::mutex mutex_;  // one is tried at a time; guards known_
  std::vector<std::pair<std::shared_ptr<cuda::Gpu>, Result<MemoryWay>>> known_;
};

// Of a GPU's memory, by the way that works; from then on what NICs write into that GPU is flushed.
using RegisterMemory = std::function<Result<std::shared_ptr<NicRegistration>>(MemoryWay)>;
Result<std::shared_ptr<NicRegistration>> register_gpu_memory(const MemoryRegion& region,
                                                             GpuWays& ways, cuda::Gpus& gpus,
                                                             const RegisterMemory& make);

}  // namespace kvxfer
