// A memory region at one libfabric domain. Its one key works for a peer only at an endpoint that
// this peer was told of: closing that is the peer's fence. Any thread.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_set>

#include "fabric/nic/nic_registration.hpp"
#include "fabric/ofi/flushes.hpp"
#include "fabric/ofi/open_domain.hpp"
#include "memory_region.hpp"

namespace kvxfer::ofi {

class OfiRegistration final : public NicRegistration {
 public:
  // `flushes`: where closing a key does not stop the write that is being placed, otherwise null.
  static Result<std::shared_ptr<NicRegistration>> create(std::shared_ptr<const OpenDomain> domain,
                                                         std::shared_ptr<Flushes> flushes,
                                                         const MemoryRegion& region, MemoryWay way);
  ~OfiRegistration() override { (void)close(); }

  MemoryWay way() const override { return way_; }
  Result<RemoteKey> share(PeerId peer) override;
  void unshare(PeerId peer) override;
  Result<void> close() override;

  // For writing from it; null where the provider needs none.
  void* descriptor() const { return descriptor_; }

 private:
  OfiRegistration(std::shared_ptr<const OpenDomain> domain, std::shared_ptr<Flushes> flushes,
                  UniqueFid<fid_mr> memory, std::uint64_t address, MemoryWay way);

  std::shared_ptr<const OpenDomain> domain_;
  std::shared_ptr<Flushes> flushes_;
  RemoteKey key_;
  void* descriptor_;
  MemoryWay way_;
  std::mutex mutex_;
  UniqueFid<fid_mr> memory_;            // null once closed
  Result<void> closed_;                 // how that went
  std::unordered_set<PeerId> writers_;  // that know the key
};

}  // namespace kvxfer::ofi
