#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "timing.hpp"

namespace kvxfer::probes {

inline constexpr std::size_t kMailPageBytes = 4096;

/// One 4 KiB page and two counters in memory that two processes map: the least that a message
/// between them can cost. `posted` is written by the sender only, `taken` by the receiver only.
/// A futex wakes a side that sleeps. Starts zeroed.
struct SharedMailbox {
  alignas(64) std::atomic<std::uint32_t> posted;
  alignas(64) std::atomic<std::uint32_t> taken;
  alignas(kMailPageBytes) std::byte page[kMailPageBytes];
};

/// Announces the page `count` times, each after the former was taken and `gap_ns` have passed.
/// Returns the time of each announcement.
std::vector<std::int64_t> mailbox_post(SharedMailbox& mailbox, std::size_t count,
                                       std::int64_t gap_ns, Wait wait);

/// A page in the memory of another process.
struct RemotePage {
  pid_t pid;
  std::uintptr_t address;
};

/// Copies the page `count` times, each when it was announced: with memcpy from the mailbox, or
/// with process_vm_readv if a remote page is given. Returns the time at which each copy was
/// complete.
std::vector<std::int64_t> mailbox_take(SharedMailbox& mailbox, std::size_t count, Wait wait,
                                       std::optional<RemotePage> remote);

}  // namespace kvxfer::probes
