// The scale of a block of e4m3 elements.
#pragma once

#include <algorithm>
#include <limits>

#include "moe/dtype.hpp"

namespace kvxfer::moe {

// Returns the scale of a block whose largest magnitude is `largest`: a normal number, so that x /
// scale is exact to the last place even if x is very small.
inline float scale_of(float largest) {
  using Limits = std::numeric_limits<float>;
  if (largest == 0) return 1;
  return std::max(std::min(largest, Limits::max()) / kLargestE4m3, Limits::min());
}

}  // namespace kvxfer::moe
