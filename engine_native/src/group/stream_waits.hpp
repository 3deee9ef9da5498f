// Streams of GPUs that wait for counters. A stream goes on once its counter has reached the total,
// or never will. Also words in memory that mirror counters. Engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/stream_order.hpp"
#include "imm_counter.hpp"
#include "kvxfer/types.hpp"
#include "thread_owner.hpp"

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
  // Updates the mirror until the counter ends or nothing holds the mirror.
  void mirror(Imm imm, const std::shared_ptr<cuda::MirroredCount>& mirror);
  // Ends waits and updates mirrors. Returns the number of ended waits.
  std::size_t poll(std::uint64_t now);
  void end_all(const Error& why);
  std::uint64_t next_deadline_ns() const { return next_deadline_ns_; }

 private:
  // Ends the wait if its counter or deadline allows. Returns false while it goes on.
  bool ended(const Waiting& waiting, std::uint64_t now) const;
  void update_mirrors();

  [[no_unique_address]] ThreadOwner thread_;
  const ImmCounters& counters_;
  std::vector<Waiting> waiting_;
  std::vector<std::pair<Imm, std::weak_ptr<cuda::MirroredCount>>> mirrors_;
  std::uint64_t seen_changes_ = 0;
  std::uint64_t next_deadline_ns_ = UINT64_MAX;
};

}  // namespace kvxfer
