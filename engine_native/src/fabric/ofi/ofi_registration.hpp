// A memory region registered with one libfabric domain. A peer can use its one key only at an
// endpoint that this peer was told of, so closing the endpoint is the peer's fence. Any thread.
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
  // `flushes`: null if closing a key stops a write that is being placed.
  static Result<std::shared_ptr<NicRegistration>> create(std::shared_ptr<const OpenDomain> domain,
                                                         std::shared_ptr<Flushes> flushes,
                                                         const MemoryRegion& region, MemoryWay way);
  ~OfiRegistration() override { (void)close(); }

  MemoryWay way() const override { return way_; }
  Result<RemoteKey> share(PeerId peer) override;
  void unshare(PeerId peer) override;
  Result<void> close() override;

  // Returns the descriptor for writing from the region; null if the provider needs none.
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
  Result<void> closed_;                 // result of closing
  std::unordered_set<PeerId> writers_;  // peers that know the key
};

}  // namespace kvxfer::ofi
