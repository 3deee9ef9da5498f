#include "fabric/ofi/ofi_registration.hpp"

#include <optional>
#include <string>
#include <vector>

#include "cuda/gpu.hpp"

namespace kvxfer::ofi {

Result<std::shared_ptr<NicRegistration>> OfiRegistration::create(
    std::shared_ptr<const OpenDomain> domain, std::shared_ptr<Flushes> flushes,
    const MemoryRegion& region, MemoryWay way) {
  OpenDomain::Memory memory{.address = region.address(), .size = region.size()};
  if (region.gpu()) memory.gpu = region.gpu()->device();
  std::optional<cuda::Gpu::Dmabuf> dmabuf;
  if (way == MemoryWay::dmabuf) {
    if (domain->library.version() < kDmabufSince) {
      return Error{Errc::fabric_unavailable,
                   "libfabric " + domain->library.version_text() + " is older than 1.20"};
    }
    auto made = region.gpu()->dmabuf(region.address(), region.size());
    if (!made) return made.error();
    memory.dmabuf = &dmabuf.emplace(std::move(*made));
  }
  auto registered = domain->register_memory(memory, FI_WRITE | FI_REMOTE_WRITE);
  if (!registered) return registered.error();
  return std::shared_ptr<NicRegistration>(new OfiRegistration(
      std::move(domain), std::move(flushes), std::move(*registered), region.address(), way));
}

OfiRegistration::OfiRegistration(std::shared_ptr<const OpenDomain> domain,
                                 std::shared_ptr<Flushes> flushes, UniqueFid<fid_mr> memory,
                                 std::uint64_t address, MemoryWay way)
    : domain_(std::move(domain)),
      flushes_(std::move(flushes)),
      key_{.address = domain_->remote_start(address),
           .rkey = ::fi_mr_key(memory.get()),
           .valid = true},
      descriptor_(domain_->local_keys ? ::fi_mr_desc(memory.get()) : nullptr),
      way_(way),
      memory_(std::move(memory)) {}

Result<RemoteKey> OfiRegistration::share(PeerId peer) {
  const std::lock_guard lock(mutex_);
  if (!memory_) {
    return Error{Errc::unknown_region, "the memory region is not registered any more"};
  }
  writers_.insert(peer);
  return key_;
}

void OfiRegistration::unshare(PeerId peer) {
  const std::lock_guard lock(mutex_);
  writers_.erase(peer);
}

Result<void> OfiRegistration::close() {
  std::vector<PeerId> writers;
  {
    const std::lock_guard lock(mutex_);
    if (!memory_) return closed_;
    // Closed only once: libfabric's efa frees its object, whether or not the NIC gave up the
    // memory.
    if (const int error = ::fi_close(&memory_.release()->fid)) {
      closed_ = Error{
          Errc::nic_lost,
          domain_->library
                  .failed("NIC " + domain_->device.name + " does not deregister memory", error)
                  .text +
              "; the memory is within its reach until the engine is closed: keep it until then"};
      return closed_;
    }
    writers.assign(writers_.begin(), writers_.end());
  }
  if (flushes_) flushes_->wait_for(writers);
  return {};
}

}  // namespace kvxfer::ofi
