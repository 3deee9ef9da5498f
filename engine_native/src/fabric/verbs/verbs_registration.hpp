// A memory region registered with one device. Any thread.
#pragma once

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
                                                         const MemoryRegion& region);
  ~VerbsRegistration() override { (void)close(); }

  Result<RemoteKey> share(PeerId peer) override;
  void unshare(PeerId) override {}
  Result<void> close() override;

  // Null once closed, which is after the engine thread has closed all windows of the region.
  ibv_mr* get();
  std::uint32_t local_key() const { return local_key_; }

 private:
  VerbsRegistration(std::shared_ptr<const VerbsDevice> device, ibv_mr* region)
      : device_(std::move(device)), region_(region), local_key_(region->lkey) {}

  std::shared_ptr<const VerbsDevice> device_;
  std::mutex mutex_;
  ibv_mr* region_;  // null once closed; guarded by mutex_
  std::uint32_t local_key_;
};

}  // namespace kvxfer::verbs
