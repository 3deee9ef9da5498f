// The sender's memory, which the receiver reads: mapped if the sender shared it, with
// process_vm_readv otherwise. Engine thread only.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "fabric/local/page_copy.hpp"
#include "fabric/local/ring.hpp"
#include "fd.hpp"
#include "kvxfer/error.hpp"
#include "thread_owner.hpp"

namespace kvxfer::local {

class SourceMemory {
 public:
  // `pidfd` shows whether `pid` is still the process that was authenticated.
  SourceMemory(pid_t pid, UniqueFd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}

  pid_t pid() const { return pid_; }

  // Adds a region of the peer, shared as a sealed memfd of at least `size` bytes.
  Result<void> add_region(std::uint32_t number, UniqueFd memfd, std::uint64_t size);
  void remove_region(std::uint32_t number) { regions_.erase(number); }
  bool has_region(std::uint32_t number) const { return regions_.contains(number); }

  // Returns the mapped bytes; null if they leave the region.
  const std::byte* in_region(std::uint32_t number, std::uint64_t offset,
                             std::uint32_t length) const;

  // Copies from the peer's addresses (PageCopy::source is an address in its process). Returns ok,
  // permission-denied, peer-lost, or out-of-bounds for an address that is not mapped there.
  Errc read(std::span<const PageCopy> copies);

 private:
  struct Unmap {
    std::size_t size = 0;
    void operator()(const std::byte* data) const;
  };
  struct Region {
    std::unique_ptr<const std::byte, Unmap> data;
    std::uint64_t size;
  };

  bool peer_alive() const;

  [[no_unique_address]] ThreadOwner thread_;
  pid_t pid_;
  UniqueFd pidfd_;
  std::unordered_map<std::uint32_t, Region> regions_;
};

}  // namespace kvxfer::local
