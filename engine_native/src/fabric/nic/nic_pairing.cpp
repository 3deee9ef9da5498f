#include "fabric/nic/nic_pairing.hpp"

#include <algorithm>
#include <string_view>

namespace kvxfer {
namespace {

using Numbers = std::vector<std::uint32_t>;

Numbers of_network(std::span<const NicInfo> nics, std::string_view network) {
  Numbers numbers;
  for (std::uint32_t n = 0; n < nics.size(); ++n) {
    if (nics[n].network == network) numbers.push_back(n);
  }
  return numbers;
}

// Adds `count` pairs; the NICs of the side with fewer take turns.
void pair_by_position(const Numbers& here, const Numbers& there, std::size_t count,
                      std::vector<NicPair>& pairs) {
  if (here.empty() || there.empty()) return;
  for (std::size_t k = 0; k < count; ++k) {
    pairs.push_back({here[k % here.size()], there[k % there.size()]});
  }
}

}  // namespace

bool shares_network(const NicInfo& nic, std::span<const NicInfo> theirs) {
  return std::any_of(theirs.begin(), theirs.end(),
                     [&](const NicInfo& their) { return their.network == nic.network; });
}

std::vector<NicPair> pair_nics(std::span<const NicInfo> ours, NicMask our_usable,
                               std::span<const NicInfo> theirs, NicMask their_usable) {
  const auto is_up = [&](const NicPair& pair) {
    return (our_usable >> pair.ours & 1) != 0 && (their_usable >> pair.theirs & 1) != 0;
  };
  std::vector<NicPair> all;
  std::vector<std::string_view> done;
  for (const NicInfo& nic : ours) {
    if (std::ranges::find(done, nic.network) != done.end()) continue;
    done.push_back(nic.network);
    const Numbers here = of_network(ours, nic.network);
    const Numbers there = of_network(theirs, nic.network);
    std::vector<NicPair> pairs;
    Numbers here_left = here;
    Numbers there_left = there;
    for (const std::uint32_t our : here) {
      const auto same = std::ranges::find_if(
          there_left, [&](std::uint32_t their) { return theirs[their].name == ours[our].name; });
      if (same == there_left.end()) continue;
      pairs.push_back({our, *same});
      there_left.erase(same);
      std::erase(here_left, our);
    }
    const std::size_t left = std::max(here_left.size(), there_left.size());
    pair_by_position(here_left.empty() ? here : here_left, there_left.empty() ? there : there_left,
                     left, pairs);
    std::erase_if(pairs, [&](const NicPair& pair) { return !is_up(pair); });
    if (pairs.empty()) {
      Numbers here_up = here;
      Numbers there_up = there;
      std::erase_if(here_up, [&](std::uint32_t n) { return (our_usable >> n & 1) == 0; });
      std::erase_if(there_up, [&](std::uint32_t n) { return (their_usable >> n & 1) == 0; });
      pair_by_position(here_up, there_up, std::max(here_up.size(), there_up.size()), pairs);
    }
    all.insert(all.end(), pairs.begin(), pairs.end());
  }
  return all;
}

}  // namespace kvxfer
