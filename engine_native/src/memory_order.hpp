// Fences for plain accesses to memory that a peer process maps. ThreadSanitizer knows no fences; it
// sees two mappings of one memory as two memories anyway.
#pragma once

#include <atomic>

namespace kvxfer {

// Keeps later stores from being seen before earlier ones. On ARM a store or read-modify-write alone
// does not do that, whatever its order: STLR and STLXR let later plain stores pass.
inline void order_stores() {
#ifndef __SANITIZE_THREAD__
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

// Keeps earlier reads from moving behind it.
inline void order_reads() {
#ifndef __SANITIZE_THREAD__
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

}  // namespace kvxfer
