#include "fabric/verbs/path_budget.hpp"

#include <algorithm>

#include "fabric/verbs/path_windows.hpp"
#include "operation.hpp"

namespace kvxfer::verbs {
namespace {

constexpr std::uint32_t kMinSends = kMaxGroupWrites;
constexpr std::uint32_t kMaxSends = 256;
constexpr std::uint32_t kMinReceives = 64;
constexpr std::uint32_t kMaxReceivesOfPath = 1024;

}  // namespace

PathBudget::PathBudget(std::uint32_t completions, std::uint32_t receives)
    : sends_(std::clamp(completions / 256, kMinSends, kMaxSends)),
      completions_left_(completions),
      receives_left_(receives) {}

// After an error every send completes, signalled or not; one more marks the end (VerbsPath::shut).
std::uint32_t PathBudget::completions_of(const PathShare& share) {
  return share.sends + share.receives + PathWindows::kMaxRequests + 1;
}

std::optional<PathShare> PathBudget::take() {
  if (completions_left_ < completions_of({sends_, 0})) return std::nullopt;
  const std::uint32_t left =
      std::min(receives_left_, completions_left_ - completions_of({sends_, 0}));
  if (left < kMinReceives) return std::nullopt;
  const PathShare share{sends_, std::clamp(left / 32, kMinReceives, kMaxReceivesOfPath)};
  completions_left_ -= completions_of(share);
  receives_left_ -= share.receives;
  ++paths_;
  return share;
}

void PathBudget::give_back(const PathShare& share) {
  completions_left_ += completions_of(share);
  receives_left_ += share.receives;
  --paths_;
}

}  // namespace kvxfer::verbs
