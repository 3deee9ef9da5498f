// What orders plain accesses to memory that a peer process maps. ThreadSanitizer knows no fences;
// it sees two mappings of one memory as two memories anyway.
#pragma once

#include <atomic>

namespace kvxfer {

// No store after it is seen before a store that is before it. A store or a read-modify-write alone
// does not do that on ARM, whatever its order: STLR and STLXR let later plain stores pass.
inline void order_stores() {
#ifndef __SANITIZE_THREAD__
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

// No read before it moves behind it.
inline void order_reads() {
#ifndef __SANITIZE_THREAD__
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

}  // namespace kvxfer
