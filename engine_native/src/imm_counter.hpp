// ImmCounters counts the immediates of each value that have arrived.
//
// An immediate is slot (low 16 bits) and generation (high 16 bits). Releasing a slot raises its
// generation, so an immediate of an earlier use is never counted for a later one. Arrivals are
// counted from the allocation on, whether or not anything waits yet.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "completion_queue.hpp"
#include "kvxfer/types.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class ImmCounters {
 public:
  explicit ImmCounters(CompletionQueue& completions) : completions_(completions) {}

  enum class Released : std::uint8_t {
    was_not_live,
    complete,  // the announced total has arrived, so no write with it is under way
    pending,
  };

  // Any thread. With `writer`, only that peer's writes count.
  Result<Imm> allocate(std::optional<PeerId> writer = std::nullopt);
  std::uint64_t value(Imm imm) const { return count(imm).value_or(0); }
  // Returns no value if the counter is not live.
  std::optional<std::uint64_t> count(Imm imm) const;
  bool live(Imm imm) const;
  // Pushes a completion once the count is `total`, with protocol-error if it is greater and must be
  // exact. Replaces an earlier total, and its completion if that is not drained yet.
  Result<void> expect(Imm imm, std::uint64_t total, Expect expect = Expect::exactly);
  // Requests a completion at the next arrival. take_arrivals() returns the count and requests
  // another.
  Result<void> subscribe(Imm imm);
  std::uint64_t take_arrivals(Imm imm);

  // --- engine thread, which alone decides between "placed" and "dropped"
  // True if the counter is live and this peer may write with it.
  bool counts(Imm imm, PeerId from) const;
  // Returns false, and counts nothing, if counts() is false.
  bool add(Imm imm, PeerId from, std::uint64_t arrived);
  Released release(Imm imm);
  std::optional<PeerId> writer(Imm imm) const;
  // Grows with every arrival and release.
  std::uint64_t changes() const { return changes_; }

 private:
  struct Slot {
    std::uint16_t generation = 1;  // never 0, so that immediate 0 is never live
    bool live = false;
    std::uint64_t count = 0;
    std::uint64_t last_arrival_ns = 0;
    std::optional<std::uint64_t> total;
    std::optional<PeerId> writer;
    bool exact = true;
    bool reported = false;  // the completion of the last total was pushed
    bool subscribed = false;
    bool told = false;      // arrivals were reported, and not taken yet
    bool complete = false;  // a total was announced, and has arrived
  };

  // Slots are reused in turn and only when this many exist: 67 million allocations lie between
  // two uses of one immediate.
  static constexpr std::size_t kSlotsBeforeReuse = 1024;
  static constexpr std::size_t kMaxSlots = 65536;

  static bool counts(const Slot* slot, PeerId from) {
    return slot && (!slot->writer || *slot->writer == from);
  }
  Slot* find(Imm imm);
  const Slot* find(Imm imm) const;
  void complete_if_reached(Imm imm, Slot& slot);

  [[no_unique_address]] ThreadOwner thread_;
  CompletionQueue& completions_;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::deque<std::uint16_t> free_;
  std::uint64_t changes_ = 0;  // engine thread
};

}  // namespace kvxfer
