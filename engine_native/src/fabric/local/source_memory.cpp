#include "fabric/local/source_memory.hpp"

#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>

#include "aligned_mapping.hpp"
#include "error_text.hpp"
#include "retire.hpp"

namespace kvxfer::local {
namespace {

constexpr std::size_t kMaxIovecs = 1024;  // the kernel's limit for one call
// The most regions of one peer. Each is a mapping, and a process has 65,530 mappings by default.
constexpr std::size_t kMaxRegions = 8192;

Errc read_error(int error) {
  if (error == EPERM || error == ENOSYS) return Errc::permission_denied;
  return error == ESRCH ? Errc::peer_lost : Errc::out_of_bounds;
}

}  // namespace

Result<void> SourceMemory::add_region(std::uint32_t number, UniqueFd memfd, std::uint64_t size) {
  thread_.check("SourceMemory");
  struct stat status{};
  if (size == 0 || !sealed_against_shrinking(memfd.get()) || ::fstat(memfd.get(), &status) != 0 ||
      static_cast<std::uint64_t>(status.st_size) < size) {
    return Error{Errc::protocol_error, "the peer shared a region that is not a sealed memfd"};
  }
  if (regions_.size() >= kMaxRegions && !regions_.contains(number)) {
    return Error{Errc::backpressure, "the peer shares more than " + std::to_string(kMaxRegions) +
                                         " memory regions; let it register fewer, larger ones"};
  }
  const std::byte* data = map_aligned(memfd.get(), size, PROT_READ);
  if (!data) {
    return Error{Errc::out_of_memory, "cannot map " + std::to_string(size) +
                                          " bytes of the peer's memory: " + errno_text()};
  }
  regions_.insert_or_assign(number, Region{{data, Unmap{size}}, size});
  return {};
}

const std::byte* SourceMemory::in_region(std::uint32_t number, std::uint64_t offset,
                                         std::uint32_t length) const {
  const auto found = regions_.find(number);
  if (found == regions_.end()) return nullptr;
  const Region& region = found->second;
  if (offset > region.size || length > region.size - offset) return nullptr;
  return region.data.get() + offset;
}

Errc SourceMemory::read(std::span<const PageCopy> copies) {
  thread_.check("SourceMemory");
  std::array<iovec, kMaxIovecs> local;
  std::array<iovec, kMaxIovecs> remote;
  while (!copies.empty()) {
    const std::size_t count = std::min(copies.size(), kMaxIovecs);
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
      local[i] = {copies[i].destination, copies[i].length};
      remote[i] = {const_cast<std::byte*>(copies[i].source), copies[i].length};
      bytes += copies[i].length;
    }
    const ssize_t got = ::process_vm_readv(pid_, local.data(), count, remote.data(), count, 0);
    if (got < 0) return read_error(errno);
    // A short read stops at an address that is not mapped.
    if (static_cast<std::size_t>(got) != bytes) {
      return peer_alive() ? Errc::out_of_bounds : Errc::peer_lost;
    }
    copies = copies.subspan(count);
  }
  // Had the peer died, its process id could by now be another process's.
  return peer_alive() ? Errc::ok : Errc::peer_lost;
}

bool SourceMemory::peer_alive() const {
  pollfd exited{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  return ::poll(&exited, 1, 0) == 0;
}

void SourceMemory::Unmap::operator()(const std::byte* data) const {
  retire([memory = const_cast<std::byte*>(data), bytes = size] { ::munmap(memory, bytes); });
}

}  // namespace kvxfer::local
