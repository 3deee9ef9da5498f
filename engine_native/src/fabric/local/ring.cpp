#include "fabric/local/ring.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "error_text.hpp"

namespace kvxfer::local {
namespace {

Error ring_failed(const char* what) {
  return {Errc::out_of_memory, std::string(what) + ": " + errno_text()};
}

RingMemory* map_ring(int memfd) {
  void* memory = ::mmap(nullptr, sizeof(RingMemory), PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<RingMemory*>(memory);
}

}  // namespace

Result<SharedRing> SharedRing::create() {
  UniqueFd memfd(::memfd_create("kvxfer-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memfd || ::ftruncate(memfd.get(), sizeof(RingMemory)) != 0 ||
      ::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ring_failed("cannot create a descriptor ring");
  }
  RingMemory* memory = map_ring(memfd.get());
  if (!memory) return ring_failed("cannot map a descriptor ring");
  ::new (memory) RingMemory{};
  memory->producer_sleeps_until.store(RingMemory::kAwake);
  return SharedRing(std::move(memfd), memory);
}

Result<SharedRing> SharedRing::map(UniqueFd memfd) {
  struct stat status{};
  if (!sealed_against_shrinking(memfd.get()) || ::fstat(memfd.get(), &status) != 0 ||
      static_cast<std::size_t>(status.st_size) < sizeof(RingMemory)) {
    return Error{Errc::protocol_error, "the peer's descriptor ring is not a sealed memfd"};
  }
  RingMemory* memory = map_ring(memfd.get());
  if (!memory) return ring_failed("cannot map the peer's descriptor ring");
  return SharedRing(std::move(memfd), memory);
}

void SharedRing::Unmap::operator()(RingMemory* memory) const {
  ::munmap(memory, sizeof(RingMemory));
}

bool sealed_against_shrinking(int memfd) {
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

}  // namespace kvxfer::local
