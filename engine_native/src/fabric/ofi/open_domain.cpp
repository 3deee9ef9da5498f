#include "fabric/ofi/open_domain.hpp"

#include <cerrno>

#include "random.hpp"

namespace kvxfer::ofi {
namespace {

// Random keys collide only if keys are short.
constexpr int kKeyAttempts = 64;

}  // namespace

void EndpointErrors::add(const fid* endpoint, std::atomic<int>& error) {
  const std::lock_guard lock(mutex_);
  errors_[endpoint] = &error;
}

// Finds the entry by its error, because another endpoint may have the same fid already.
void EndpointErrors::remove(const std::atomic<int>& error) {
  const std::lock_guard lock(mutex_);
  std::erase_if(errors_, [&](const auto& each) { return each.second == &error; });
}

bool EndpointErrors::report(const fid* endpoint, int error) {
  const std::lock_guard lock(mutex_);
  const auto found = errors_.find(endpoint);
  if (found == errors_.end()) return false;
  found->second->store(error);
  return true;
}

Result<std::shared_ptr<const OpenDomain>> OpenDomain::open(const Libfabric& library, Device device,
                                                           bool strict) {
  auto opened =
      std::make_shared<OpenDomain>(OpenDomain{.library = library, .device = std::move(device)});
  fi_info& info = *opened->device.info;
  const auto failed = [&](const char* what, int error) {
    return library.failed("NIC " + opened->device.name + ": " + what, error);
  };
  fid_fabric* fabric = nullptr;
  if (const int error = library.fabric(info.fabric_attr, &fabric, nullptr)) {
    return failed("fi_fabric", error);
  }
  opened->fabric.reset(fabric);
  fi_eq_attr attributes{};
  attributes.wait_obj = FI_WAIT_NONE;
  fid_eq* events = nullptr;
  if (const int error = ::fi_eq_open(fabric, &attributes, &events, nullptr)) {
    return failed("fi_eq_open", error);
  }
  opened->events.reset(events);
  fid_domain* domain = nullptr;
  if (const int error = ::fi_domain(fabric, &info, &domain, nullptr)) {
    return failed("fi_domain", error);
  }
  opened->domain.reset(domain);
  opened->local_keys = strict || opened->device.mr_mode(FI_MR_LOCAL);
  return std::shared_ptr<const OpenDomain>(std::move(opened));
}

Result<UniqueFid<fid_mr>> OpenDomain::register_memory(const Memory& memory,
                                                      std::uint64_t access) const {
  const iovec whole{.iov_base = reinterpret_cast<void*>(memory.address), .iov_len = memory.size};
  MemoryAttributes attributes{};
  attributes.mr_iov = &whole;
  attributes.iov_count = 1;
  attributes.access = access;
  if (memory.gpu) {
    attributes.iface = FI_HMEM_CUDA;
    attributes.device.cuda = *memory.gpu;
  }
  Dmabuf dmabuf{};
  if (memory.dmabuf) {
    const std::uint64_t offset = memory.dmabuf->offset;
    dmabuf = {.fd = memory.dmabuf->fd.get(),
              .offset = offset,
              .size = memory.size,
              .base_address = reinterpret_cast<void*>(memory.address - offset)};
    attributes.mr_iov = reinterpret_cast<const iovec*>(&dmabuf);
  }
  const bool choose = !device.mr_mode(FI_MR_PROV_KEY);
  const std::size_t key_bytes =
      std::min(device.info->domain_attr->mr_key_size, sizeof(std::uint64_t));
  int error = 0;
  for (int attempt = 0; attempt < kKeyAttempts; ++attempt) {
    attributes.requested_key = 0;  // random: knowing it is the permission to write
    if (choose) random_bytes(&attributes.requested_key, key_bytes);
    fid_mr* registered = nullptr;
    errno = 0;  // efa returns it even if it has not called the kernel
    error = ::fi_mr_regattr(domain.get(), &attributes, memory.dmabuf ? kDmabuf : 0, &registered);
    if (error == 0) return UniqueFid<fid_mr>(registered);
    if (!choose || error != -FI_ENOKEY) break;
  }
  Error why = library.failed(
      "NIC " + device.name + " cannot register " + std::to_string(memory.size) + " bytes of memory",
      error);
  if (error == -FI_ENOMEM) {
    why.text += memory.gpu ? "; its GPU's BAR1 may be too small or full: nvidia-smi -q -d MEMORY"
                           : "; raise the locked memory limit (ulimit -l)";
  }
  return why;
}

const char* OpenDomain::failure() const {
  thread.check("OpenDomain");
  struct {
    fi_eq_err_entry entry{};
    std::uint64_t added_later[8]{};
  } error;
  std::uint32_t event = 0;
  while (failed == 0 && ::fi_eq_read(events.get(), &event, &error, sizeof error, 0) == -FI_EAVAIL &&
         ::fi_eq_readerr(events.get(), &error.entry, 0) > 0) {
    if (!endpoints->report(error.entry.fid, error.entry.err)) failed = error.entry.err;
  }
  return failed == 0 ? nullptr : library.strerror(failed);
}

std::uint64_t OpenDomain::remote_start(std::uint64_t address) const {
  return device.mr_mode(FI_MR_VIRT_ADDR) ? address : 0;
}

}  // namespace kvxfer::ofi
