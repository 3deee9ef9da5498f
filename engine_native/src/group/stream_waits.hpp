// Streams of GPUs that wait for counters. Each is let go on once its counter has got there, or
// never will. Engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/stream_order.hpp"
#include "imm_counter.hpp"
#include "kvxfer/types.hpp"

namespace kvxfer {

class StreamWaits {
 public:
  struct Waiting {
    std::shared_ptr<cuda::QueuedWait> wait;
    Imm imm = 0;
    std::uint64_t total = 0;
    Expect expect = Expect::exactly;
    std::uint64_t deadline_ns = 0;
  };

  explicit StreamWaits(const ImmCounters& counters) : counters_(counters) {}

  void add(Waiting waiting);
  // How many have ended.
  std::size_t poll(std::uint64_t now);
  void end_all(const Error& why);
  std::uint64_t next_deadline_ns() const { return next_deadline_ns_; }

 private:
  // Nothing while it goes on waiting.
  bool ended(const Waiting& waiting, std::uint64_t now) const;

  const ImmCounters& counters_;
  std::vector<Waiting> waiting_;
  std::uint64_t seen_changes_ = 0;
  std::uint64_t next_deadline_ns_ = UINT64_MAX;
};

}  // namespace kvxfer
