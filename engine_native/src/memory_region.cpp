#include "memory_region.hpp"

#include <algorithm>
#include <string>

#include "cuda/gpu.hpp"
#include "random.hpp"
#include "retire.hpp"

namespace kvxfer {
namespace {

Error cannot_register(const void* address, std::size_t bytes) {
  return {Errc::invalid_argument, "cannot register " + std::to_string(bytes) +
                                      " bytes at address " +
                                      std::to_string(reinterpret_cast<std::uintptr_t>(address)) +
                                      "; pass memory of at least 1 byte"};
}

}  // namespace

Result<RegionPtr> MemoryRegion::allocate(EngineId engine, std::size_t bytes) {
  auto memory = SharedMemory::allocate(bytes);
  if (!memory) return memory.error();
  RegionPtr region = make(engine, (*memory)->address(), bytes);
  region->shared_ = std::move(*memory);
  return region;
}

Result<RegionPtr> MemoryRegion::allocate_on(EngineId engine, std::shared_ptr<cuda::Gpu> gpu,
                                            std::size_t bytes) {
  if (bytes == 0) return cannot_register(nullptr, bytes);
  const auto address = gpu->allocate(bytes);
  if (!address) return address.error();
  RegionPtr region = make(engine, *address, bytes);
  region->ipc_handle_ = gpu->handle_of(*address);
  region->gpu_ = std::move(gpu);
  region->allocated_ = true;
  return region;
}

Result<RegionPtr> MemoryRegion::wrap(EngineId engine, void* address, std::size_t bytes,
                                     std::shared_ptr<cuda::Gpu> gpu) {
  const auto start = reinterpret_cast<std::uint64_t>(address);
  if (!address || bytes == 0 || start + bytes < bytes) return cannot_register(address, bytes);
  RegionPtr region = make(engine, start, bytes);
  if (!gpu) {
    region->shared_ = SharedMemory::around(start, bytes);
  } else {
    region->ipc_handle_ = gpu->handle_of(start);
    const auto allocation = gpu->range_of(start);
    region->ipc_offset_ = allocation ? start - allocation->start : 0;
    region->gpu_ = std::move(gpu);
  }
  return region;
}

RegionPtr MemoryRegion::grant(EngineId engine, const RegionRange& range, Imm imm, PeerId writer) {
  RegionPtr granted = make(engine, range.region->address() + range.offset, range.length);
  granted->gpu_ = range.region->gpu_;
  granted->grant_ = Grant{.of = range.region, .imm = imm, .writer = writer};
  return granted;
}

MemoryRegion::MemoryRegion(EngineId engine, std::uint64_t address, std::size_t size)
    : engine_(engine), address_(address), size_(size) {
  random_bytes(&key_, sizeof key_);
}

RegionPtr MemoryRegion::make(EngineId engine, std::uint64_t address, std::size_t size) {
  return {new MemoryRegion(engine, address, size), [](MemoryRegion* last) {
            // A grant holds only a reference.
            last->granted() ? delete last : retire([last] { delete last; });
          }};
}

MemoryRegion::~MemoryRegion() {
  registrations_.clear();  // first: no NIC may reach freed memory
  if (allocated_) gpu_->free(address_);
}

MrDescriptor MemoryRegion::descriptor() const {
  return {.engine = engine_,
          .key = key_,
          .length = size_,
          .imm = grant_ ? grant_->imm : 0,
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
