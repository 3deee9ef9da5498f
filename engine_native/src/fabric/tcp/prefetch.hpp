// Prefetches scattered small pages before the kernel copies them.
#pragma once

#include <cstddef>

namespace kvxfer::tcp {

// The kernel copies one page after the other and waits for the first bytes of each. Fetching the
// pages of a whole batch beforehand overlaps these waits: a third less CPU time at 1 KiB, nothing
// from 4 KiB on.
inline constexpr std::size_t kPrefetchUpTo = 2048;
inline constexpr std::size_t kLine = 64;

inline void prefetch_to_read(const std::byte* page, std::size_t length) {
  if (length > kPrefetchUpTo) return;
  for (std::size_t at = 0; at < length; at += kLine) __builtin_prefetch(page + at, 0, 2);
}

inline void prefetch_to_write(const std::byte* page, std::size_t length) {
  if (length > kPrefetchUpTo) return;
  for (std::size_t at = 0; at < length; at += kLine) __builtin_prefetch(page + at, 1, 2);
}

}  // namespace kvxfer::tcp
