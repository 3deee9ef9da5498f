#include "fabric/nic/nic_pairing.hpp"

#include <algorithm>
#include <string_view>

namespace kvxfer {
namespace {

std::vector<std::uint32_t> usable_of(std::span<const NicInfo> nics, NicMask usable,
                                     std::string_view network) {
  std::vector<std::uint32_t> numbers;
  for (std::uint32_t n = 0; n < nics.size(); ++n) {
    if ((usable >> n & 1) != 0 && nics[n].network == network) numbers.push_back(n);
  }
  return numbers;
}

}  // namespace

std::vector<NicPair> pair_nics(std::span<const NicInfo> ours, NicMask our_usable,
                               std::span<const NicInfo> theirs, NicMask their_usable) {
  std::vector<NicPair> pairs;
  std::vector<std::string_view> done;
  for (const NicInfo& nic : ours) {
    if (std::find(done.begin(), done.end(), nic.network) != done.end()) continue;
    done.push_back(nic.network);
    const auto here = usable_of(ours, our_usable, nic.network);
    const auto there = usable_of(theirs, their_usable, nic.network);
    if (here.empty() || there.empty()) continue;
    for (std::size_t k = 0; k < std::max(here.size(), there.size()); ++k) {
      pairs.push_back({here[k % here.size()], there[k % there.size()]});
    }
  }
  return pairs;
}

}  // namespace kvxfer
