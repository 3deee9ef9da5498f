#include "fabric/ofi/ofi_registration.hpp"

#include <vector>

namespace kvxfer::ofi {

Result<std::shared_ptr<OfiRegistration>> OfiRegistration::create(
    std::shared_ptr<const OpenDomain> domain, std::shared_ptr<Flushes> flushes,
    const MemoryRegion& region) {
  std::shared_ptr<OfiRegistration> made(
      new OfiRegistration(std::move(domain), std::move(flushes), region));
  if (!made->domain_->local_keys) return made;
  auto readable = made->domain_->register_memory(region.data(), region.size(), FI_WRITE);
  if (!readable) return readable.error();
  made->descriptor_ = ::fi_mr_desc(readable->get());
  made->readable_ = std::move(*readable);
  return made;
}

Result<RemoteKey> OfiRegistration::share(PeerId peer) {
  const Error gone{Errc::unknown_region, "the memory region is not registered any more"};
  const auto key_of = [this](fid_mr& writable) {
    return RemoteKey{
        .address = domain_->remote_start(start_), .rkey = ::fi_mr_key(&writable), .valid = true};
  };
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return gone;
    const auto found = writable_.find(peer);
    if (found != writable_.end()) return key_of(*found->second);
  }
  // Not under the lock: it takes long, and the engine thread may want to fence a peer.
  auto writable = domain_->register_memory(start_, size_, FI_REMOTE_WRITE);
  if (!writable) return writable.error();
  const std::lock_guard lock(mutex_);
  if (closed_) return gone;
  return key_of(*writable_.try_emplace(peer, std::move(*writable)).first->second);
}

void OfiRegistration::unshare(PeerId peer) {
  const std::lock_guard lock(mutex_);
  writable_.erase(peer);
}

Result<void> OfiRegistration::close() {
  std::vector<PeerId> writers;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (const auto& [peer, key] : writable_) writers.push_back(peer);
    writable_.clear();
    readable_.reset();
  }
  if (flushes_) flushes_->wait_for(writers);
  return {};
}

}  // namespace kvxfer::ofi
