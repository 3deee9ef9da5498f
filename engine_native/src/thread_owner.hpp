// Checks that only the thread that its header names calls an object. Debug builds (without NDEBUG)
// end the process at a call from another thread; release builds check nothing.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace kvxfer {

#ifdef NDEBUG
inline constexpr bool kChecksThreads = false;
#else
inline constexpr bool kChecksThreads = true;
#endif

// Belongs to the first thread that calls. A copy belongs to no thread yet.
template <bool checks>
class OwnerThread {
 public:
  void check(const char* /*what*/) const {}
  void hand_over() {}
};

template <>
class OwnerThread<true> {
 public:
  OwnerThread() = default;
  OwnerThread(const OwnerThread&) noexcept {}
  OwnerThread& operator=(const OwnerThread&) noexcept { return *this; }

  // `what` names the class.
  void check(const char* what) const {
    std::thread::id none;
    const std::thread::id self = std::this_thread::get_id();
    if (owner_.compare_exchange_strong(none, self) || none == self) return;
    std::fprintf(stderr, "%s: a call from a thread that is not its own\n", what);
    std::abort();
  }
  // Hands the object to the thread that calls next.
  void hand_over() { owner_ = std::thread::id(); }

 private:
  mutable std::atomic<std::thread::id> owner_;
};

using ThreadOwner = OwnerThread<kChecksThreads>;

// Allows calls of any thread, one at a time: each lasts as long as its OneAtATime::Call.
template <bool checks>
class OneCall {
 public:
  class Call {
   public:
    Call(const OneCall& /*of*/, const char* /*what*/) {}
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
  };
};

template <>
class OneCall<true> {
 public:
  class Call {
   public:
    Call(const OneCall& of, const char* what) : of_(of) {
      if (!of_.under_way_.exchange(true)) return;
      std::fprintf(stderr, "%s: two calls at once\n", what);
      std::abort();
    }
    ~Call() { of_.under_way_ = false; }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    const OneCall& of_;
  };

 private:
  mutable std::atomic<bool> under_way_ = false;
};

using OneAtATime = OneCall<kChecksThreads>;

}  // namespace kvxfer
