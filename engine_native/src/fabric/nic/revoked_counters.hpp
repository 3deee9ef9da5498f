// The counters that a peer has revoked: writes submitted for them later are not posted. NicLink's.
//
// The last revoked generation of each slot is kept; generations before it were revoked earlier.
// There are 65,535 generations, and they wrap around, so "before" is bounded:
//
//  - An older generation is at most kBefore behind. Slots are used in turn, 1,024 or more of them,
//    so the peer has made 4 million counters since.
//  - A live generation is ahead. It would be taken for an older one if it were 61,439 ahead: the
//    peer would have to make 62 million counters within kRememberedNs, 100,000 a second. After
//    kRememberedNs the entry is void, however many counters were made.
//
// A write that is submitted after that is posted. It counts for nothing, and its receiver revokes
// its counter again.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "kvxfer/types.hpp"

namespace kvxfer {

class RevokedCounters {
 public:
  static constexpr std::uint16_t kBefore = 4096;
  static constexpr std::uint64_t kRememberedNs = 600'000'000'000u;

  void add(Imm imm, std::uint64_t now) { slots_[slot_of(imm)] = {generation_of(imm), now}; }
  bool contains(Imm imm, std::uint64_t now) const {
    const auto found = slots_.find(slot_of(imm));
    if (found == slots_.end() || now > found->second.since_ns + kRememberedNs) return false;
    return static_cast<std::uint16_t>(found->second.generation - generation_of(imm)) < kBefore;
  }

 private:
  struct Revoked {
    std::uint16_t generation;
    std::uint64_t since_ns;
  };
  static std::uint16_t slot_of(Imm imm) { return static_cast<std::uint16_t>(imm); }
  static std::uint16_t generation_of(Imm imm) { return static_cast<std::uint16_t>(imm >> 16); }

  std::unordered_map<std::uint16_t, Revoked> slots_;
};

}  // namespace kvxfer
