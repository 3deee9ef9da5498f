#include "memory_region.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>

#include "aligned_mapping.hpp"
#include "cuda/gpu.hpp"
#include "error_text.hpp"
#include "random.hpp"

namespace kvxfer {
namespace {

Error cannot_allocate(std::size_t bytes) {
  return {Errc::out_of_memory, "cannot allocate " + std::to_string(bytes) +
                                   " bytes of shareable memory: " + errno_text() +
                                   "; free memory or raise the memory and open files limits"};
}

Error cannot_register(const void* address, std::size_t bytes) {
  return {Errc::invalid_argument, "cannot register " + std::to_string(bytes) +
                                      " bytes at address " +
                                      std::to_string(reinterpret_cast<std::uintptr_t>(address)) +
                                      "; pass memory of at least 1 byte"};
}

// MemAvailable of the kernel's own estimate; without it, no limit.
std::size_t available_memory() {
  std::ifstream meminfo("/proc/meminfo");
  std::string name;
  std::size_t kib = 0;
  std::string unit;
  while (meminfo >> name >> kib >> unit) {
    if (name == "MemAvailable:") return kib * 1024;
  }
  return SIZE_MAX;
}

}  // namespace

Result<RegionPtr> MemoryRegion::allocate(EngineId engine, std::size_t bytes) {
  if (bytes == 0 || bytes > std::size_t{1} << 46) {
    return Error{Errc::invalid_argument, "cannot allocate a region of " + std::to_string(bytes) +
                                             " bytes; ask for 1 byte to 64 TiB"};
  }
  // The memory is populated at once; the kernel would not say no, but end some process.
  if (const std::size_t available = available_memory(); bytes > available) {
    return Error{Errc::out_of_memory, "cannot allocate " + std::to_string(bytes) +
                                          " bytes: this host has " + std::to_string(available) +
                                          " bytes of memory available"};
  }
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t mapped = (bytes + page - 1) / page * page;
  UniqueFd memfd(::memfd_create("kvxfer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memfd || ::ftruncate(memfd.get(), static_cast<off_t>(mapped)) != 0 ||
      ::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return cannot_allocate(bytes);
  }
  std::byte* data = map_aligned(memfd.get(), mapped, PROT_READ | PROT_WRITE);
  if (!data) return cannot_allocate(bytes);
  populate_huge(data, mapped);
  // From now on nobody can write through the memfd that peers are given, this mapping apart.
  const bool sealed = ::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0;
  RegionPtr region(new MemoryRegion(engine, reinterpret_cast<std::uint64_t>(data), bytes));
  region->memfd_ = std::move(memfd);
  region->shareable_ = sealed;
  return region;
}

Result<RegionPtr> MemoryRegion::allocate_on(EngineId engine, std::shared_ptr<cuda::Gpu> gpu,
                                            std::size_t bytes) {
  if (bytes == 0) return cannot_register(nullptr, bytes);
  const auto address = gpu->allocate(bytes);
  if (!address) return address.error();
  RegionPtr region(new MemoryRegion(engine, *address, bytes));
  region->ipc_handle_ = gpu->handle_of(*address);
  region->gpu_ = std::move(gpu);
  region->allocated_ = true;
  return region;
}

Result<RegionPtr> MemoryRegion::wrap(EngineId engine, void* address, std::size_t bytes,
                                     std::shared_ptr<cuda::Gpu> gpu) {
  const auto start = reinterpret_cast<std::uint64_t>(address);
  if (!address || bytes == 0 || start + bytes < bytes) return cannot_register(address, bytes);
  RegionPtr region(new MemoryRegion(engine, start, bytes));
  if (gpu) {
    region->ipc_handle_ = gpu->handle_of(start);
    const auto allocation = gpu->range_of(start);
    region->ipc_offset_ = allocation ? start - allocation->start : 0;
    region->gpu_ = std::move(gpu);
  }
  return region;
}

RegionPtr MemoryRegion::grant(EngineId engine, const RegionRange& range, Imm imm, PeerId writer) {
  RegionPtr granted(new MemoryRegion(engine, range.region->address() + range.offset, range.length));
  granted->gpu_ = range.region->gpu_;
  granted->grant_ = Grant{.of = range.region, .imm = imm, .writer = writer};
  return granted;
}

MemoryRegion::MemoryRegion(EngineId engine, std::uint64_t address, std::size_t size)
    : engine_(engine), address_(address), size_(size) {
  random_bytes(&key_, sizeof key_);
}

MemoryRegion::~MemoryRegion() {
  registrations_.clear();  // no NIC reaches what is freed
  if (allocated_) gpu_->free(address_);
  if (!memfd_) return;
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  ::munmap(host(), (size_ + page - 1) / page * page);
}

MrDescriptor MemoryRegion::descriptor() const {
  return {.engine = engine_,
          .key = key_,
          .address = address_,
          .length = size_,
          .kind = gpu_ ? MemoryKind::cuda : MemoryKind::host,
          .device = static_cast<std::uint8_t>(gpu_ ? gpu_->device() : 0)};
}

std::span<std::byte> bytes_of(const RegionPtr& region) {
  return {region->host(), region->gpu() ? 0 : region->size()};
}

MrDescriptor descriptor_of(const RegionPtr& region) { return region->descriptor(); }

void MemoryRegion::set_registrations(std::vector<std::shared_ptr<NicRegistration>> registrations) {
  registrations_ = std::move(registrations);
  registered_ = std::any_of(registrations_.begin(), registrations_.end(),
                            [](const auto& registration) { return registration != nullptr; });
}

void MemoryRegion::unshare(PeerId peer) const {
  for (const auto& registration : registrations_) {
    if (registration) registration->unshare(peer);
  }
}

Result<void> MemoryRegion::close_registrations() const {
  Result<void> all;
  for (const auto& registration : registrations_) {
    if (!registration) continue;
    if (auto closed = registration->close(); !closed && all) all = closed;
  }
  return all;
}

void RegionTable::insert(const RegionPtr& region) {
  const std::lock_guard lock(mutex_);
  regions_.emplace(region->key(), region);
}

bool RegionTable::erase(std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  return regions_.erase(key) > 0;
}

RegionPtr RegionTable::find(std::uint64_t key) const {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(key);
  return found == regions_.end() ? nullptr : found->second;
}

std::vector<RegionPtr> RegionTable::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<RegionPtr> regions;
  regions.reserve(regions_.size());
  for (const auto& [key, region] : regions_) regions.push_back(region);
  return regions;
}

}  // namespace kvxfer
