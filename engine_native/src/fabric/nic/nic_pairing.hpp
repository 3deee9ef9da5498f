// The choice of NICs of two engines that get a path between them. Pure.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "kvxfer/types.hpp"

namespace kvxfer {

struct NicPair {
  std::uint32_t ours = 0;
  std::uint32_t theirs = 0;
  auto operator<=>(const NicPair&) const = default;
};

// Bit n: NIC n is usable.
using NicMask = std::uint64_t;

// True if the peer has a NIC that this one reaches.
bool shares_network(const NicInfo& nic, std::span<const NicInfo> theirs);

// Pairs NICs within each network that both sides have: those of the same name, then of the others
// the k-th with the k-th; on the side with fewer NICs, one serves several of the other side's.
// Pairing counts all NICs of a side, not only usable ones, so that one that is down moves no other
// to another rail; its partner rests. Only if no such pair is usable are the usable NICs paired.
std::vector<NicPair> pair_nics(std::span<const NicInfo> ours, NicMask our_usable,
                               std::span<const NicInfo> theirs, NicMask their_usable);

}  // namespace kvxfer
