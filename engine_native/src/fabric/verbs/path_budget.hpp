// Divides a NIC's completion queue and receives among its paths, so that neither can overrun. Pure.
#pragma once

#include <cstdint>
#include <optional>

namespace kvxfer::verbs {

// The share of one path: writes under way, and receives for the peer's immediates.
struct PathShare {
  std::uint32_t sends = 0;
  std::uint32_t receives = 0;
};

// Returns the number of writes that fill a link: its bandwidth times the time until a write is
// known to be delivered, in pages of 4 KiB.
std::uint32_t deep_enough(std::uint64_t bits_per_second);

// The shares of a NIC. The first paths get as many sends as fill the link (`most_sends`), and many
// receives, because credit for used ones comes back slowly, over the control stream. Later paths
// get a part of what is left.
class PathBudget {
 public:
  PathBudget(std::uint32_t completions, std::uint32_t receives, std::uint32_t most_sends);

  std::optional<PathShare> take();
  void give_back(const PathShare& share);
  std::uint32_t paths() const { return paths_; }

 private:
  static std::uint32_t completions_of(const PathShare& share);

  std::uint32_t most_sends_;
  std::uint32_t completions_left_;
  std::uint32_t receives_left_;
  std::uint32_t paths_ = 0;
};

}  // namespace kvxfer::verbs
