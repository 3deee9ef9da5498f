#include "shared_mailbox.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <system_error>
#include <thread>

namespace kvxfer::probes {
namespace {

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Waits until `counter` is no longer `old`.
void await_change(std::atomic<std::uint32_t>& counter, std::uint32_t old, Wait wait) {
  const std::int64_t deadline = now_ns() + kPatienceNs;
  while (counter.load(std::memory_order_acquire) == old) {
    if (wait == Wait::kSleep) {
      const timespec patience{.tv_sec = 1, .tv_nsec = 0};
      syscall(SYS_futex, &counter, FUTEX_WAIT, old, &patience, nullptr, 0);
    } else {
      pause();
    }
    if (now_ns() > deadline) {
      throw std::system_error(ETIMEDOUT, std::generic_category(), "shared mailbox");
    }
  }
}

void advance(std::atomic<std::uint32_t>& counter, Wait wait) {
  counter.fetch_add(1, std::memory_order_release);
  if (wait == Wait::kSleep) {
    syscall(SYS_futex, &counter, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void read_remote(const RemotePage& remote, std::array<std::byte, kMailPageBytes>& page) {
  const iovec local{page.data(), page.size()};
  const iovec source{reinterpret_cast<void*>(remote.address), page.size()};
  if (process_vm_readv(remote.pid, &local, 1, &source, 1, 0) != kMailPageBytes) {
    throw std::system_error(errno, std::generic_category(), "process_vm_readv");
  }
}

}  // namespace

std::vector<std::int64_t> mailbox_post(SharedMailbox& mailbox, std::size_t count,
                                       std::int64_t gap_ns, Wait wait) {
  std::vector<std::int64_t> posted_at;
  posted_at.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (gap_ns > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(gap_ns));
    const std::uint32_t taken = mailbox.taken.load(std::memory_order_acquire);
    posted_at.push_back(now_ns());
    advance(mailbox.posted, wait);
    await_change(mailbox.taken, taken, wait);
  }
  return posted_at;
}

std::vector<std::int64_t> mailbox_take(SharedMailbox& mailbox, std::size_t count, Wait wait,
                                       std::optional<RemotePage> remote) {
  alignas(64) std::array<std::byte, kMailPageBytes> page;
  std::vector<std::int64_t> taken_at;
  taken_at.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    // Nothing is outstanding when both are equal, whichever side comes first.
    const std::uint32_t taken = mailbox.taken.load(std::memory_order_relaxed);
    await_change(mailbox.posted, taken, wait);
    if (remote) {
      read_remote(*remote, page);
    } else {
      std::memcpy(page.data(), mailbox.page, page.size());
    }
    // Keep the copy, which is what is timed.
    asm volatile("" : : "r"(page.data()) : "memory");
    taken_at.push_back(now_ns());
    advance(mailbox.taken, wait);
  }
  return taken_at;
}

}  // namespace kvxfer::probes
