// The way in which a NIC reaches memory of each GPU, found by trying. Registering memory may
// succeed although no write ever arrives, as without peer-to-peer support of the kernel or behind
// an IOMMU. Any thread.
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
  // Registers memory; peermem uses the GPU's address. Fails with fabric-unavailable if the NIC does
  // not take the memory this way.
  virtual Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion& region,
                                                                   MemoryWay way) = 0;
  // Writes from an address of memory that is registered here. Returns once the NIC reports that the
  // bytes have arrived.
  virtual Result<void> write(const NicRegistration& source, std::uint64_t from, const RemoteKey& to,
                             std::uint32_t bytes) = 0;

 protected:
  // The timeout of a write. Within one NIC it takes microseconds, the first one milliseconds.
  static constexpr std::uint64_t kPatienceNs = 1'000'000'000;
  static constexpr auto kPause = std::chrono::microseconds(20);
  static Error broken(std::string why) { return {Errc::fabric_unavailable, std::move(why)}; }
  [[no_unique_address]] ThreadOwner thread_;
};

class GpuWays {
 public:
  struct Nic {
    std::string name;
    std::string by_address;  // the name of its second way
    std::function<bool()> is_up;
    std::function<Result<std::unique_ptr<NicLoop>>()> open_loop;
  };

  explicit GpuWays(Nic nic) : nic_(std::move(nic)) {}

  // Returns dmabuf if it works, else peermem. Fails with fabric-unavailable, and the fault of each,
  // if neither works. If they could not be tried, fails with other codes, and the next call tries
  // again: nic-lost if the link is down or the NIC does not reach memory of the host either. The
  // first call takes some milliseconds.
  Result<MemoryWay> find(const std::shared_ptr<cuda::Gpu>& gpu);

 private:
  Nic nic_;
  std::mutex mutex_;  // held while a way is tried; guards known_
  std::vector<std::pair<std::shared_ptr<cuda::Gpu>, Result<MemoryWay>>> known_;
};

// Registers memory of a GPU by the way that works; from then on, writes of NICs to that GPU are
// flushed.
using RegisterMemory = std::function<Result<std::shared_ptr<NicRegistration>>(MemoryWay)>;
Result<std::shared_ptr<NicRegistration>> register_gpu_memory(const MemoryRegion& region,
                                                             GpuWays& ways, cuda::Gpus& gpus,
                                                             const RegisterMemory& make);

}  // namespace kvxfer
