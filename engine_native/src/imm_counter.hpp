// ImmCounters: how many immediates of each value have arrived.
//
// An immediate is slot (low 16 bits) and generation (high 16 bits). Releasing a slot raises its
// generation, so an immediate of an earlier use is never counted for a later one. Arrivals are
// counted from the allocation on, whether or not anybody waits yet.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "completion_queue.hpp"
#include "kvxfer/types.hpp"

namespace kvxfer {

class ImmCounters {
 public:
  explicit ImmCounters(CompletionQueue& completions) : completions_(completions) {}

  // Any thread.
  Result<Imm> allocate();
  std::uint64_t value(Imm imm) const;
  bool live(Imm imm) const;
  // A completion follows once the count is `total`; protocol-error if it is more.
  Result<void> expect(Imm imm, std::uint64_t total);

  // Engine thread, which alone decides between "placed" and "dropped".
  void add(Imm imm, std::uint64_t arrived);
  void release(Imm imm);

 private:
  struct Slot {
    std::uint16_t generation = 1;  // never 0, so that immediate 0 is never live
    bool live = false;
    std::uint64_t count = 0;
    std::uint64_t last_arrival_ns = 0;
    std::optional<std::uint64_t> total;
  };

  // Slots are reused in turn and only when this many exist: 67 million allocations lie between
  // two uses of one immediate.
  static constexpr std::size_t kSlotsBeforeReuse = 1024;
  static constexpr std::size_t kMaxSlots = 65536;

  Slot* find(Imm imm);
  const Slot* find(Imm imm) const;
  void complete_if_reached(Imm imm, Slot& slot);

  CompletionQueue& completions_;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::deque<std::uint16_t> free_;
};

}  // namespace kvxfer
