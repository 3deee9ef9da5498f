// How one NIC reaches memory of each GPU, found out by trying: registering it may succeed where
// nothing written ever arrives, as without peer-to-peer support of the kernel or behind an IOMMU.
// Any thread.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/gpu.hpp"
#include "fabric/verbs/verbs_registration.hpp"

namespace kvxfer::verbs {

class GpuWays {
 public:
  explicit GpuWays(std::shared_ptr<const VerbsDevice> device) : device_(std::move(device)) {}

  // dmabuf if it works, else peermem; fails with fabric-unavailable and what is wrong with each,
  // and with other codes where it could not be tried, nic-lost where the link is down: then it is
  // tried again the next time. Some milliseconds, the first time.
  Result<MemoryWay> find(const std::shared_ptr<cuda::Gpu>& gpu);

 private:
  std::shared_ptr<const VerbsDevice> device_;
  std::mutex mutex_;  // one is tried at a time; guards known_
  std::vector<std::pair<std::shared_ptr<cuda::Gpu>, Result<MemoryWay>>> known_;
};

}  // namespace kvxfer::verbs
