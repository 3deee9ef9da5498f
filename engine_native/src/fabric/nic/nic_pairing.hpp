// Which NICs of two engines get a path between them. Pure.
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

// Whether the peer has a NIC that this one reaches.
bool shares_network(const NicInfo& nic, std::span<const NicInfo> theirs);

// Within each network that both sides have NICs of: those of the same name, then of the others the
// k-th with the k-th, where the side with fewer serves several of the other's with one. This is by
// all of a side's NICs, not by those that are usable, so that one that is down moves no other to
// another rail; its partner rests. Only where no such pair is usable is any that is.
std::vector<NicPair> pair_nics(std::span<const NicInfo> ours, NicMask our_usable,
                               std::span<const NicInfo> theirs, NicMask their_usable);

}  // namespace kvxfer
