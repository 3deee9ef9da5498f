// Decides how long a peer may be silent before it counts as frozen.
//
// A thread that waits for a core sends heartbeats late and is not dead. For a process on this host
// the kernel reports whether a thread waits; for another host, only its earlier delays are known.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace kvxfer {

inline constexpr const char* kEngineThreadName = "kvxfer-engine";

// The state of the engine threads of a process.
enum class EngineThreads : std::uint8_t {
  unknown,    // the process is not visible here, or they sleep
  stopped,    // by a signal or a debugger
  want_core,  // at least one runs, or would if it had a core
};
EngineThreads engine_threads_of(pid_t pid);

class Patience {
 public:
  explicit Patience(std::uint64_t now) : heard_ns_(now), half_began_ns_(now) {}

  // Notes that the peer ran at this time.
  void hear(std::uint64_t at_ns);
  // Takes `stalled_ns` before `now`, in which this engine itself did not run, off the silence.
  void forgive(std::uint64_t stalled_ns, std::uint64_t now);
  std::uint64_t silence(std::uint64_t now) const { return now > heard_ns_ ? now - heard_ns_ : 0; }
  // True if the silence is too long. `limit_ns` applies to a peer that has its core; a starved one
  // gets up to kMostLimits times as long. `pid`: its process on this host, or 0.
  bool ends(std::uint64_t limit_ns, pid_t pid, std::uint64_t now) const;
  // The longest silence that ended, among those remembered.
  std::uint64_t longest_ns() const { return longest_ns_ > before_ns_ ? longest_ns_ : before_ns_; }

 private:
  std::uint64_t heard_ns_;
  // The longest silence that ended, in the current and the previous half of the remembered time.
  std::uint64_t longest_ns_ = 0;
  std::uint64_t before_ns_ = 0;
  std::uint64_t half_began_ns_;
};

inline constexpr std::uint64_t kMostLimits = 3;

}  // namespace kvxfer
