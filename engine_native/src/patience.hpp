// How long a peer may be silent before it is taken for frozen.
//
// A thread that waits for a core beats late and is not dead. Of a process on this host the kernel
// says which it is; of another host we know only how late it was before.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace kvxfer {

inline constexpr const char* kEngineThreadName = "kvxfer-engine";

// Of the engine threads of a process.
enum class EngineThreads : std::uint8_t {
  unknown,    // the process is not visible here, or they sleep
  stopped,    // by a signal or a debugger
  want_core,  // at least one runs, or would if it had a core
};
EngineThreads engine_threads_of(pid_t pid);

class Patience {
 public:
  explicit Patience(std::uint64_t now) : heard_ns_(now), half_began_ns_(now) {}

  // The peer ran at this time.
  void hear(std::uint64_t at_ns);
  // This engine itself did not run for so long before `now`: that is no peer's silence.
  void forgive(std::uint64_t stalled_ns, std::uint64_t now);
  std::uint64_t silence(std::uint64_t now) const { return now > heard_ns_ ? now - heard_ns_ : 0; }
  // Whether a silence is too long. `limit_ns` is that of a peer which has its core: one that is
  // starved gets up to kMostLimits of it. `pid`: its process on this host, or 0.
  bool ends(std::uint64_t limit_ns, pid_t pid, std::uint64_t now) const;
  // The longest silence that ended, of those that are remembered.
  std::uint64_t longest_ns() const { return longest_ns_ > before_ns_ ? longest_ns_ : before_ns_; }

 private:
  std::uint64_t heard_ns_;
  // The longest silence that ended, in this half of the time that is remembered and the one before.
  std::uint64_t longest_ns_ = 0;
  std::uint64_t before_ns_ = 0;
  std::uint64_t half_began_ns_;
};

inline constexpr std::uint64_t kMostLimits = 3;

}  // namespace kvxfer
