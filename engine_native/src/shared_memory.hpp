// Host memory in a memfd, which peers on this host can map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "fd.hpp"
#include "kvxfer/error.hpp"

namespace kvxfer {

// Any thread.
class SharedMemory {
 public:
  // Allocates zeroed memory, sealed so that a peer can map it safely: it can neither shrink nor
  // grow under the peer, and the peer cannot write to it. A kernel that cannot prevent writes
  // (before Linux 5.1) leaves it unsealed. Asks for huge pages. The first `resident` bytes are
  // allocated at once, the rest by make_resident().
  static Result<std::shared_ptr<SharedMemory>> allocate(std::size_t bytes,
                                                        std::size_t resident = SIZE_MAX);
  // Returns the shared memory in which these bytes of this process lie; null for other memory.
  static std::shared_ptr<SharedMemory> around(std::uint64_t address, std::size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Fails with out-of-memory if the host has less.
  static Result<void> make_resident(std::span<std::byte> bytes);

  std::span<std::byte> bytes() const { return bytes_; }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(bytes_.data()); }
  int memfd() const { return memfd_.get(); }
  // True if a peer may have the memfd.
  bool sealed() const { return sealed_; }

 private:
  SharedMemory(UniqueFd memfd, std::span<std::byte> bytes);

  UniqueFd memfd_;
  std::span<std::byte> bytes_;
  bool sealed_;
};

}  // namespace kvxfer
