#include "memory.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <utility>

namespace kvxfer::cuda_double {
namespace {

constexpr int kPoison = 0xdb;
constexpr std::string_view kName = "cuda-double-";  // followed by the device

std::byte* map(int fd, std::size_t size) {
  void* const at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
}

}  // namespace

std::shared_ptr<Backing> Backing::make(std::size_t size, int device) {
  const std::string name = std::string(kName) + std::to_string(device);
  UniqueFd memfd(::memfd_create(name.c_str(), MFD_CLOEXEC));
  if (!memfd || ::ftruncate(memfd.get(), static_cast<off_t>(size)) != 0) return nullptr;
  return adopt(std::move(memfd));
}

std::shared_ptr<Backing> Backing::adopt(UniqueFd memfd) {
  struct stat found{};
  if (!memfd || ::fstat(memfd.get(), &found) != 0 || found.st_size <= 0) return nullptr;
  std::error_code unknown;
  const std::string name =
      std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(memfd.get()), unknown);
  const auto at = name.find(kName);
  if (unknown || at == std::string::npos) return nullptr;
  const auto size = static_cast<std::size_t>(found.st_size);
  std::byte* const bytes = map(memfd.get(), size);
  if (!bytes) return nullptr;
  const int device = name[at + kName.size()] - '0';
  return std::shared_ptr<Backing>(new Backing(std::move(memfd), bytes, size, device));
}

Backing::~Backing() { ::munmap(bytes_, size_); }

void Backing::poison() { std::memset(bytes_, kPoison, size_); }

// --- addresses -------------------------------------------------------------------------------

CUresult Memory::add(Mapping mapping) {
  const std::lock_guard lock(mutex_);
  const auto next = mappings_.lower_bound(mapping.base);
  const bool overlaps =
      (next != mappings_.end() && next->first < mapping.base + mapping.size) ||
      (next != mappings_.begin() &&
       std::prev(next)->second->base + std::prev(next)->second->size > mapping.base);
  if (overlaps) return CUDA_ERROR_ALREADY_MAPPED;
  mapping.buffer_id = ++last_buffer_;
  const CUdeviceptr base = mapping.base;
  mappings_.emplace(base, std::make_shared<Mapping>(std::move(mapping)));
  return CUDA_SUCCESS;
}

std::shared_ptr<Mapping> Memory::remove(CUdeviceptr base, Kind kind) {
  const std::lock_guard lock(mutex_);
  const auto found = mappings_.find(base);
  if (found == mappings_.end() || found->second->kind != kind) return nullptr;
  auto mapping = std::move(found->second);
  mappings_.erase(found);
  return mapping;
}

void Memory::end(const Mapping& mapping) {
  switch (mapping.kind) {
    case Kind::host:
    case Kind::managed:
      ::munmap(mapping.alias(), mapping.size);
      return;
    case Kind::registered:
    case Kind::vmm:  // the address is still reserved
      return;
    case Kind::device:
    case Kind::pool:
      mapping.backing->poison();
      break;
    case Kind::imported:
      break;
  }
  give_back(mapping.base, whole(mapping.size));
}

void Memory::drop(CUcontext context) {
  std::vector<std::shared_ptr<Mapping>> dropped;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(mappings_, [&](const auto& entry) {
      if (entry.second->context != context) return false;
      dropped.push_back(entry.second);
      return true;
    });
  }
  for (const auto& mapping : dropped) end(*mapping);
}

std::shared_ptr<Mapping> Memory::find(CUdeviceptr address) const {
  const std::lock_guard lock(mutex_);
  const auto after = mappings_.upper_bound(address);
  if (after == mappings_.begin()) return nullptr;
  const auto& mapping = std::prev(after)->second;
  return address - mapping->base < mapping->size ? mapping : nullptr;
}

bool Memory::Pieces::ready() const {
  return std::all_of(of.begin(), of.end(), [](const auto& mapping) {
    return !mapping->allocated || mapping->allocated->reached();
  });
}

Memory::Pieces Memory::resolve(CUdeviceptr address, std::size_t size, bool pageable_allowed) const {
  Pieces pieces;
  std::size_t done = 0;
  while (done < size) {
    const auto mapping = find(address + done);
    if (!mapping || !mapping->accessible()) break;
    const std::size_t offset = address + done - mapping->base;
    const std::size_t length = std::min(size - done, mapping->size - offset);
    pieces.bytes.emplace_back(mapping->alias() + offset, length);
    pieces.of.push_back(mapping);
    done += length;
    // Two allocations of cuMemAlloc never form one range, even if they are adjacent.
    if (mapping->kind != Kind::vmm) break;
  }
  if (done == size) return pieces;
  if (done > 0 || !pageable_allowed) return {};
  {
    // An address that was a device's, or is reserved for one, is not host memory.
    const std::lock_guard lock(mutex_);
    const auto inside = [&](CUdeviceptr begin, std::size_t length) {
      return address < begin + length && begin < address + size;
    };
    for (const auto& [length, begin] : given_back_) {
      if (inside(begin, length)) return {};
    }
    for (const auto& [begin, length] : reservations_) {
      if (inside(begin, length)) return {};
    }
    for (const auto& [begin, mapping] : mappings_) {
      if (inside(begin, mapping->size)) return {};
    }
  }
  pieces.bytes.emplace_back(reinterpret_cast<std::byte*>(address), size);
  pieces.pageable = true;
  return pieces;
}

CUdeviceptr Memory::reserve(std::size_t size) {
  {
    const std::lock_guard lock(mutex_);
    const auto last = given_back_.upper_bound(size);
    if (last != given_back_.begin() && std::prev(last)->first == size) {
      const CUdeviceptr address = std::prev(last)->second;
      given_back_.erase(std::prev(last));
      return address;
    }
  }
  // Aligned like a driver's addresses.
  void* const at = ::mmap(nullptr, size + kGranularity, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return 0;
  const auto address = reinterpret_cast<CUdeviceptr>(at);
  return (address + kGranularity - 1) / kGranularity * kGranularity;
}

void Memory::give_back(CUdeviceptr address, std::size_t size) {
  const std::lock_guard lock(mutex_);
  given_back_.emplace(size, address);
}

// --- cuMemCreate -----------------------------------------------------------------------------

CUmemGenericAllocationHandle Memory::keep(Physical physical) {
  const std::lock_guard lock(mutex_);
  physical_.emplace(++last_handle_, std::make_shared<Physical>(std::move(physical)));
  return last_handle_;
}

std::shared_ptr<Physical> Memory::physical(CUmemGenericAllocationHandle handle) const {
  const std::lock_guard lock(mutex_);
  const auto found = physical_.find(handle);
  return found == physical_.end() ? nullptr : found->second;
}

bool Memory::release(CUmemGenericAllocationHandle handle) {
  const std::lock_guard lock(mutex_);
  return physical_.erase(handle) > 0;
}

void Memory::add_reservation(CUdeviceptr address, std::size_t size) {
  const std::lock_guard lock(mutex_);
  reservations_.emplace(address, size);
}

bool Memory::remove_reservation(CUdeviceptr address, std::size_t size) {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != size) return false;
  const auto next = mappings_.lower_bound(address);
  if (next != mappings_.end() && next->first < address + size) return false;
  reservations_.erase(found);
  return true;
}

bool Memory::reserved(CUdeviceptr address, std::size_t size) const {
  const auto [begin, length] = reservation_of(address);
  return length > 0 && size <= length - (address - begin);
}

std::pair<CUdeviceptr, std::size_t> Memory::reservation_of(CUdeviceptr address) const {
  const std::lock_guard lock(mutex_);
  const auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return {};
  const auto& [begin, length] = *std::prev(after);
  return address - begin < length ? std::pair(begin, length)
                                  : std::pair<CUdeviceptr, std::size_t>();
}

std::size_t Memory::live() const {
  const std::lock_guard lock(mutex_);
  return mappings_.size() + physical_.size();
}

}  // namespace kvxfer::cuda_double
