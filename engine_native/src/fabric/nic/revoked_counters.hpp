// Which counters a peer has revoked: what is submitted for them later is not posted. NicLink's.
//
// Of each slot the last revoked generation is kept; those before it were revoked earlier. There are
// 65,535 generations, and they come round, so "before" has to end somewhere:
//
//  - An older one is at most kBefore behind. Slots are used in turn, 1,024 or more of them, so the
//    peer has made 4 million counters since.
//  - A live one is ahead. To be taken for an older one it would have to be 61,439 ahead: the peer
//    would have to make 62 million counters within kRememberedNs, 100,000 a second. Then the entry
//    is void, however few or many they were.
//
// A write that is submitted later than that is posted. It counts for nothing, and its receiver
// revokes its counter again.
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
