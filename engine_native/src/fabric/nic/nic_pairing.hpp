// Which NICs of two engines get a path between them. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvxfer/types.hpp"

namespace kvxfer {

struct NicPair {
  std::uint32_t ours = 0;
  std::uint32_t theirs = 0;
  bool operator==(const NicPair&) const = default;
};

// Bit n: NIC n is usable.
using NicMask = std::uint64_t;

// Within each network that both sides have usable NICs of, the k-th path joins the k-th of both,
// and the side with fewer NICs serves several of the other's with one.
std::vector<NicPair> pair_nics(std::span<const NicInfo> ours, NicMask our_usable,
                               std::span<const NicInfo> theirs, NicMask their_usable);

}  // namespace kvxfer
