#include "imm_counter.hpp"

#include <string>
#include <utility>

#include "clock.hpp"

namespace kvxfer {
namespace {

Imm make_imm(std::uint16_t generation, std::size_t slot) {
  return static_cast<Imm>(generation) << 16 | static_cast<Imm>(slot);
}

Error stale(Imm imm) {
  return {Errc::stale_counter,
          "counter " + std::to_string(imm) +
              " is not live at this engine: it was released or never allocated"};
}

}  // namespace

Result<Imm> ImmCounters::allocate(std::optional<PeerId> writer) {
  const std::lock_guard lock(mutex_);
  std::size_t index = 0;
  if (!free_.empty() && slots_.size() >= kSlotsBeforeReuse) {
    index = free_.front();
    free_.pop_front();
  } else if (slots_.size() < kMaxSlots) {
    index = slots_.size();
    slots_.emplace_back();
  } else {
    return Error{Errc::out_of_memory,
                 "all 65536 counters are in use; release counters of finished transfers"};
  }
  Slot& slot = slots_[index];
  slot.live = true;
  slot.writer = writer;
  return make_imm(slot.generation, index);
}

std::optional<std::uint64_t> ImmCounters::count(Imm imm) const {
  const std::lock_guard lock(mutex_);
  const Slot* slot = find(imm);
  return slot ? std::optional(slot->count) : std::nullopt;
}

bool ImmCounters::live(Imm imm) const {
  const std::lock_guard lock(mutex_);
  return find(imm) != nullptr;
}

Result<void> ImmCounters::expect(Imm imm, std::uint64_t total, Expect expect) {
  const std::lock_guard lock(mutex_);
  Slot* slot = find(imm);
  if (!slot) return stale(imm);
  slot->total = total;
  slot->exact = expect == Expect::exactly;
  slot->complete = false;
  if (std::exchange(slot->reported, false)) completions_.take_back(Completion::Kind::counter, imm);
  complete_if_reached(imm, *slot);
  return {};
}

Result<void> ImmCounters::subscribe(Imm imm) {
  const std::lock_guard lock(mutex_);
  Slot* slot = find(imm);
  if (!slot) return stale(imm);
  slot->subscribed = true;
  return {};
}

std::uint64_t ImmCounters::take_arrivals(Imm imm) {
  const std::lock_guard lock(mutex_);
  Slot* slot = find(imm);
  if (!slot) return 0;
  slot->told = false;
  return slot->count;
}

bool ImmCounters::counts(Imm imm, PeerId from) const {
  const std::lock_guard lock(mutex_);
  return counts(find(imm), from);
}

bool ImmCounters::add(Imm imm, PeerId from, std::uint64_t arrived) {
  thread_.check("ImmCounters");
  const std::lock_guard lock(mutex_);
  Slot* slot = find(imm);
  if (!counts(slot, from)) return false;
  ++changes_;
  slot->count += arrived;
  slot->last_arrival_ns = now_ns();
  slot->complete = false;  // more than was announced
  complete_if_reached(imm, *slot);
  if (slot->subscribed && !slot->told) {
    slot->told = true;
    completions_.push(
        {.kind = Completion::Kind::arrival, .id = imm, .timestamp_ns = slot->last_arrival_ns});
  }
  return true;
}

ImmCounters::Released ImmCounters::release(Imm imm) {
  thread_.check("ImmCounters");
  const std::lock_guard lock(mutex_);
  Slot* slot = find(imm);
  if (!slot) return Released::was_not_live;
  ++changes_;
  const bool complete = slot->complete;
  if (slot->total) {
    completions_.push({.kind = Completion::Kind::counter,
                       .id = imm,
                       .code = Errc::stale_counter,
                       .text = "counter " + std::to_string(imm) + " was released at " +
                               std::to_string(slot->count) + " of " + std::to_string(*slot->total) +
                               " immediates"});
  }
  std::uint16_t next = static_cast<std::uint16_t>(slot->generation + 1);
  *slot = Slot{.generation = next == 0 ? std::uint16_t{1} : next};
  free_.push_back(static_cast<std::uint16_t>(slot - slots_.data()));
  return complete ? Released::complete : Released::pending;
}

std::optional<PeerId> ImmCounters::writer(Imm imm) const {
  const std::lock_guard lock(mutex_);
  const Slot* slot = find(imm);
  return slot ? slot->writer : std::nullopt;
}

const ImmCounters::Slot* ImmCounters::find(Imm imm) const {
  const std::size_t index = imm & 0xffff;
  if (index >= slots_.size()) return nullptr;
  const Slot& slot = slots_[index];
  return slot.live && slot.generation == imm >> 16 ? &slot : nullptr;
}

ImmCounters::Slot* ImmCounters::find(Imm imm) {
  return const_cast<Slot*>(std::as_const(*this).find(imm));
}

void ImmCounters::complete_if_reached(Imm imm, Slot& slot) {
  if (!slot.total || slot.count < *slot.total) return;
  Completion completion{
      .kind = Completion::Kind::counter, .id = imm, .timestamp_ns = slot.last_arrival_ns};
  slot.complete = slot.exact && slot.count == *slot.total;
  if (slot.exact && slot.count > *slot.total) {
    completion.code = Errc::protocol_error;
    completion.text = "counter " + std::to_string(imm) + " stands at " +
                      std::to_string(slot.count) + " immediates, but " +
                      std::to_string(*slot.total) +
                      " were waited for; wait for the sum of `immediates` of all operations that "
                      "carry it, or for at least so many (wait_at_least)";
  }
  slot.total.reset();
  slot.reported = true;
  completions_.push(std::move(completion));
}

}  // namespace kvxfer
