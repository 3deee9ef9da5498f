#include "fabric/verbs/verbs_registration.hpp"

#include <sys/resource.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <thread>

#include "clock.hpp"
#include "cuda/gpu.hpp"
#include "error_text.hpp"
#include "memory_region.hpp"

namespace kvxfer::verbs {
namespace {

// Relaxed ordering (ignored by devices that lack it) lets PCIe place the bytes of writes in any
// order. The completion of an immediate is itself a strictly ordered PCIe write, which overtakes no
// earlier one, and no byte is read here before that completion.
constexpr unsigned kAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING;

constexpr std::uint64_t kBusyNs = 500'000'000;
constexpr auto kBusyPause = std::chrono::milliseconds(1);

Error cannot_register(const std::string& nic, std::size_t bytes, int error) {
  const std::string what =
      "NIC " + nic + " cannot register " + std::to_string(bytes) + " bytes of memory: ";
  rlimit limit{};
  const bool limited = ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  if (limited && (error == ENOMEM || error == EPERM)) {
    return {Errc::permission_denied,
            what + "this process may lock " + std::to_string(limit.rlim_cur) +
                " bytes (ulimit -l); raise the limit (ulimit -l unlimited, in Kubernetes the "
                "capability IPC_LOCK)"};
  }
  if (error == ENOMEM) {
    return {Errc::out_of_memory, what + "the host or the NIC has no room for it; free memory"};
  }
  return {
      error == EPERM ? Errc::permission_denied : Errc::invalid_argument,
      what + errno_text(error) + "; it must be mapped, readable and writable, for all its bytes"};
}

Error cannot_register_gpu(const std::string& nic, const MemoryRegion& region, int error) {
  const bool full = error == ENOMEM || error == ENOSPC;
  return {full ? Errc::out_of_memory : Errc::fabric_unavailable,
          "NIC " + nic + " cannot register " + std::to_string(region.size()) + " bytes of " +
              region.gpu()->label() + ": " + errno_text(error) +
              (full ? "; its BAR1 may be too small or full: nvidia-smi -q -d MEMORY" : "")};
}

// Returns null, with errno, if the NIC refuses the memory.
Result<ibv_mr*> register_dmabuf(const VerbsDevice& device, const MemoryRegion& region) {
  if (!device.library().reg_dmabuf_mr) {
    return Error{Errc::fabric_unavailable, "libibverbs is older than rdma-core 34"};
  }
  const auto dmabuf = region.gpu()->dmabuf(region.address(), region.size());
  if (!dmabuf) return dmabuf.error();
  errno = 0;
  return device.library().reg_dmabuf_mr(device.pd(), dmabuf->offset, region.size(),
                                        region.address(), dmabuf->fd.get(),
                                        static_cast<int>(kAccess));
}

}  // namespace

Result<std::shared_ptr<NicRegistration>> VerbsRegistration::create(
    std::shared_ptr<const VerbsDevice> device, const MemoryRegion& region, MemoryWay way) {
  const auto address = region.address();
  ibv_mr* registered = nullptr;
  if (way == MemoryWay::dmabuf) {
    auto made = register_dmabuf(*device, region);
    if (!made) return made.error();
    registered = *made;
  } else {
    const unsigned access = kAccess | (device->has_windows() ? IBV_ACCESS_MW_BIND : 0);
    errno = 0;
    registered = device->library().reg_mr_iova2(device->pd(), reinterpret_cast<void*>(address),
                                                region.size(), address, access);
  }
  if (!registered && region.gpu()) return cannot_register_gpu(device->name(), region, errno);
  if (!registered) return cannot_register(device->name(), region.size(), errno);
  return std::shared_ptr<NicRegistration>(
      new VerbsRegistration(std::move(device), registered, address, way));
}

Result<RemoteKey> VerbsRegistration::share(PeerId) {
  const std::lock_guard lock(mutex_);
  if (!region_) {
    return Error{Errc::unknown_region,
                 "the memory region is not registered with NIC " + device_->name() + " any more"};
  }
  return RemoteKey{.address = address_, .rkey = remote_key_, .valid = true};
}

ibv_mr* VerbsRegistration::get() {
  const std::lock_guard lock(mutex_);
  return region_;
}

// Retries for a while: a window that its queue pair is closing keeps the region busy (EBUSY).
Result<void> VerbsRegistration::close() {
  const std::lock_guard lock(mutex_);
  if (!region_) return {};
  const std::uint64_t deadline = now_ns() + kBusyNs;
  int error = device_->library().dereg_mr(region_);
  while (error == EBUSY && now_ns() < deadline) {
    std::this_thread::sleep_for(kBusyPause);
    error = device_->library().dereg_mr(region_);
  }
  if (error != 0) {
    return Error{Errc::nic_lost, "NIC " + device_->name() +
                                     " does not deregister memory: " + errno_text(error) +
                                     "; the memory is within its reach until the engine is closed: "
                                     "keep it until then"};
  }
  region_ = nullptr;
  return {};
}

}  // namespace kvxfer::verbs
