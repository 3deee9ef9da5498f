// How a NIC's completion queue and receives are shared out over its paths, so that neither can
// ever overrun. Pure.
#pragma once

#include <cstdint>
#include <optional>

namespace kvxfer::verbs {

// Of one path: writes under way, and receives for the peer's immediates.
struct PathShare {
  std::uint32_t sends = 0;
  std::uint32_t receives = 0;
};

// The first paths get many receives, because credit for used ones comes back over the control
// stream, which takes a while; later ones get a part of what is left.
class PathBudget {
 public:
  PathBudget(std::uint32_t completions, std::uint32_t receives);

  std::optional<PathShare> take();
  void give_back(const PathShare& share);
  std::uint32_t paths() const { return paths_; }

 private:
  static std::uint32_t completions_of(const PathShare& share);

  std::uint32_t sends_;
  std::uint32_t completions_left_;
  std::uint32_t receives_left_;
  std::uint32_t paths_ = 0;
};

}  // namespace kvxfer::verbs
