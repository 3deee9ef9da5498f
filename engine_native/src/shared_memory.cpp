#include "shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>

#include "aligned_mapping.hpp"
#include "error_text.hpp"
#include "kvxfer/engine.hpp"
#include "retire.hpp"

namespace kvxfer {
namespace {

Error cannot_allocate(std::size_t bytes) {
  return {Errc::out_of_memory, "cannot allocate " + std::to_string(bytes) +
                                   " bytes of shareable memory: " + errno_text() +
                                   "; free memory or raise the memory and open files limits"};
}

// Returns the kernel's estimate MemAvailable, or no limit if it is missing.
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

std::size_t in_pages(std::size_t bytes) {
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

// All shared memory of this process, by address.
struct Allocated {
  std::mutex mutex;
  std::map<std::uint64_t, std::weak_ptr<SharedMemory>> by_address;
};

// Never destroyed: memory may be freed while the process ends.
Allocated& allocated() {
  static Allocated* const all = new Allocated;
  return *all;
}

// Fails if less is available: the kernel would not refuse, but kill some process.
Result<void> check_available(std::size_t bytes) {
  const std::size_t available = available_memory();
  if (bytes <= available) return {};
  return Error{Errc::out_of_memory, "cannot allocate " + std::to_string(bytes) +
                                        " bytes: this host has " + std::to_string(available) +
                                        " bytes of memory available"};
}

}  // namespace

Result<std::shared_ptr<SharedMemory>> SharedMemory::allocate(std::size_t bytes,
                                                             std::size_t resident) {
  if (bytes == 0 || bytes > std::size_t{1} << 46) {
    return Error{Errc::invalid_argument,
                 "cannot allocate " + std::to_string(bytes) + " bytes; ask for 1 byte to 64 TiB"};
  }
  if (auto good = check_available(std::min(bytes, resident)); !good) {
    await_retired();  // may free enough
    good = check_available(std::min(bytes, resident));
    if (!good) return good.error();
  }
  const std::size_t mapped = in_pages(bytes);
  UniqueFd memfd(::memfd_create("kvxfer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memfd || ::ftruncate(memfd.get(), static_cast<off_t>(mapped)) != 0 ||
      ::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return cannot_allocate(bytes);
  }
  std::byte* data = map_aligned(memfd.get(), mapped, PROT_READ | PROT_WRITE);
  if (!data) return cannot_allocate(bytes);
  populate_huge(data, std::min(mapped, resident));
  std::shared_ptr<SharedMemory> memory(new SharedMemory(std::move(memfd), {data, bytes}),
                                       [](SharedMemory* last) { retire([last] { delete last; }); });
  const std::lock_guard lock(allocated().mutex);
  allocated().by_address.emplace(memory->address(), memory);
  return memory;
}

Result<void> SharedMemory::make_resident(std::span<std::byte> bytes) {
  if (auto good = check_available(bytes.size()); !good) return good;
  populate_huge(bytes.data(), bytes.size());
  return {};
}

// Seals the memfd: from now on only this mapping can write to it.
SharedMemory::SharedMemory(UniqueFd memfd, std::span<std::byte> bytes)
    : memfd_(std::move(memfd)),
      bytes_(bytes),
      sealed_(::fcntl(memfd_.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0) {}

SharedMemory::~SharedMemory() {
  {
    const std::lock_guard lock(allocated().mutex);
    allocated().by_address.erase(address());
  }
  ::munmap(bytes_.data(), in_pages(bytes_.size()));
}

std::shared_ptr<SharedMemory> SharedMemory::around(std::uint64_t address, std::size_t bytes) {
  std::shared_ptr<SharedMemory> memory;  // outlives the lock, which its destructor takes
  const std::lock_guard lock(allocated().mutex);
  const auto next = allocated().by_address.upper_bound(address);
  if (next == allocated().by_address.begin()) return nullptr;
  memory = std::prev(next)->second.lock();
  if (!memory) return nullptr;  // it is being freed
  const std::uint64_t offset = address - memory->address();
  const std::size_t size = memory->bytes().size();
  return offset <= size && bytes <= size - offset ? memory : nullptr;
}

Result<SharedMemoryPtr> allocate_shared(std::size_t bytes) { return SharedMemory::allocate(bytes); }

std::span<std::byte> bytes_of(const SharedMemoryPtr& memory) { return memory->bytes(); }

}  // namespace kvxfer
