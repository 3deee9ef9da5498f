// A single-producer single-consumer ring in shared memory: the sender describes its writes, the
// receiver takes them out. No locks, so a killed process holds none.
//
// The peer can write every byte of the ring at any time. The consumer therefore copies each entry
// once before it looks at it, and trusts no position beyond the ring's own size.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>

#include "fd.hpp"
#include "kvxfer/error.hpp"

namespace kvxfer::local {

// A batch is its head followed by `count` writes. All writes of a batch go to one region under
// one immediate and come from one source.
struct BatchHead {
  std::uint64_t key;  // destination region
  std::uint32_t count;
  std::uint32_t imm;
  std::uint8_t has_imm;
  std::uint8_t from_region;  // sources are offsets in a shared region, else addresses
  std::uint16_t status;      // set by the consumer: an Errc
  std::uint32_t region;      // the sender's number of the shared region
};

struct WriteEntry {
  std::uint64_t source;
  std::uint64_t destination;
  std::uint32_t length;
  std::uint32_t grouped;  // see WireWrite; 0 in version 2
};

union Slot {
  BatchHead head;
  WriteEntry write;
};
static_assert(sizeof(Slot) == 24);

inline constexpr std::uint32_t kRingSlots = 16384;  // a power of two
inline constexpr std::uint32_t kMaxBatchWrites = 1024;
inline constexpr std::uint64_t kMaxBatchBytes = 4u << 20;

// Positions only grow; position modulo kRingSlots is the slot.
struct RingMemory {
  alignas(64) std::atomic<std::uint64_t> produced;  // written by the producer
  alignas(64) std::atomic<std::uint64_t> consumed;  // written by the consumer
  // Sequentially consistent, as the positions are: either a sleeper sees the new position, or it
  // is seen asleep. The producer sleeps until `consumed` reaches a position, else kAwake.
  static constexpr std::uint64_t kAwake = ~std::uint64_t{0};
  alignas(64) std::atomic<std::uint64_t> producer_sleeps_until;
  std::atomic<std::uint32_t> consumer_sleeps;
  // Set by the producer before it takes its source memory back: a consumer that was frozen in the
  // middle of a copy must not count what it copied.
  alignas(64) std::atomic<std::uint32_t> revoked;
  alignas(64) Slot slots[kRingSlots];
};

class SharedRing {
 public:
  static Result<SharedRing> create();
  // Maps a ring that a peer created; refuses one that could shrink under us.
  static Result<SharedRing> map(UniqueFd memfd);

  RingMemory* operator->() const { return memory_.get(); }
  Slot& slot(std::uint64_t position) const { return memory_->slots[position & (kRingSlots - 1)]; }
  int memfd() const { return memfd_.get(); }

 private:
  struct Unmap {
    void operator()(RingMemory* memory) const;
  };
  SharedRing(UniqueFd memfd, RingMemory* memory) : memfd_(std::move(memfd)), memory_(memory) {}

  UniqueFd memfd_;
  std::unique_ptr<RingMemory, Unmap> memory_;
};

// True if a foreign memfd has the seals that make it safe to map.
bool sealed_against_shrinking(int memfd);

}  // namespace kvxfer::local
