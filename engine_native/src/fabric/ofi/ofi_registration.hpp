// A memory region at one libfabric domain. Each peer that may write into it has a registration,
// and so a key, of its own: closing that one stops this peer and no other. Any thread.
#pragma once

#include <mutex>
#include <unordered_map>

#include "fabric/nic/nic_registration.hpp"
#include "fabric/ofi/flushes.hpp"
#include "fabric/ofi/open_domain.hpp"
#include "memory_region.hpp"

namespace kvxfer::ofi {

class OfiRegistration final : public NicRegistration {
 public:
  // `flushes`: where closing a key is no fence by itself, otherwise null.
  static Result<std::shared_ptr<OfiRegistration>> create(std::shared_ptr<const OpenDomain> domain,
                                                         std::shared_ptr<Flushes> flushes,
                                                         const MemoryRegion& region);
  ~OfiRegistration() override { (void)close(); }

  Result<RemoteKey> share(PeerId peer) override;
  void unshare(PeerId peer) override;
  Result<void> close() override;

  // For writing from it; null where the provider needs none.
  void* descriptor() const { return descriptor_; }

 private:
  OfiRegistration(std::shared_ptr<const OpenDomain> domain, std::shared_ptr<Flushes> flushes,
                  const MemoryRegion& region)
      : domain_(std::move(domain)),
        flushes_(std::move(flushes)),
        start_(region.data()),
        size_(region.size()) {}

  std::shared_ptr<const OpenDomain> domain_;
  std::shared_ptr<Flushes> flushes_;
  const std::byte* start_;
  std::size_t size_;
  void* descriptor_ = nullptr;
  std::mutex mutex_;
  bool closed_ = false;
  UniqueFid<fid_mr> readable_;  // here
  std::unordered_map<PeerId, UniqueFid<fid_mr>> writable_;
};

}  // namespace kvxfer::ofi
