// A memory region registered with one device. Any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "fabric/nic/nic_registration.hpp"
#include "fabric/verbs/verbs_device.hpp"

namespace kvxfer {
class MemoryRegion;
}

namespace kvxfer::verbs {

class VerbsRegistration final : public NicRegistration {
 public:
  static Result<std::shared_ptr<NicRegistration>> create(std::shared_ptr<const VerbsDevice> device,
                                                         const MemoryRegion& region, MemoryWay way);
  ~VerbsRegistration() override { (void)close(); }

  // True unless the region is made of a dmabuf, which takes no windows (man ibv_reg_dmabuf_mr).
  bool takes_windows() const override { return way_ != MemoryWay::dmabuf; }
  MemoryWay way() const override { return way_; }
  Result<RemoteKey> share(PeerId peer) override;
  void unshare(PeerId) override {}
  Result<void> close() override;

  // Returns null once closed, after the engine thread has closed all windows of the region.
  ibv_mr* get();
  std::uint32_t local_key() const { return local_key_; }
  std::uint32_t remote_key() const { return remote_key_; }

 private:
  VerbsRegistration(std::shared_ptr<const VerbsDevice> device, ibv_mr* region,
                    std::uint64_t address, MemoryWay way)
      : device_(std::move(device)),
        region_(region),
        address_(address),
        local_key_(region->lkey),
        remote_key_(region->rkey),
        way_(way) {}

  std::shared_ptr<const VerbsDevice> device_;
  std::mutex mutex_;
  ibv_mr* region_;         // null once closed; guarded by mutex_
  std::uint64_t address_;  // kept, because ibv_mr::addr of a dmabuf is not an address
  std::uint32_t local_key_;
  std::uint32_t remote_key_;
  MemoryWay way_;
};

}  // namespace kvxfer::verbs
