#include "fabric/verbs/path_budget.hpp"

#include <algorithm>
#include <cassert>

#include "fabric/verbs/path_windows.hpp"
#include "operation.hpp"

namespace kvxfer::verbs {
namespace {

constexpr std::uint32_t kMinSends = kMaxGroupWrites;
constexpr std::uint32_t kMinReceives = 64;
constexpr std::uint32_t kMaxReceivesOfPath = 1024;
// A path gets 1/kSendsPart and 1/kReceivesPart of what is left.
constexpr std::uint32_t kSendsPart = 64;
constexpr std::uint32_t kReceivesPart = 32;
// The round trip through a loaded network, and the time until this engine polls.
constexpr std::uint64_t kDelayNs = 80'000;
constexpr std::uint64_t kPageBits = std::uint64_t{8} * 4096;
constexpr std::uint64_t kShallow = 256;
constexpr std::uint64_t kDeepest = 1024;

}  // namespace

std::uint32_t deep_enough(std::uint64_t bits_per_second) {
  const std::uint64_t pages = bits_per_second / 1'000'000 * kDelayNs / 1000 / kPageBits;
  return static_cast<std::uint32_t>(std::clamp(pages, kShallow, kDeepest));
}

PathBudget::PathBudget(std::uint32_t completions, std::uint32_t receives, std::uint32_t most_sends)
    : most_sends_(std::max(most_sends, kMinSends)),
      completions_left_(completions),
      receives_left_(receives) {}

// Counts every send, because after an error each completes, signalled or not; one more marks the
// end (VerbsPath::shut).
std::uint32_t PathBudget::completions_of(const PathShare& share) {
  return share.sends + share.receives + PathWindows::kMaxRequests + 1;
}

std::optional<PathShare> PathBudget::take() {
  PathShare share{.sends = std::clamp(completions_left_ / kSendsPart, kMinSends, most_sends_)};
  if (completions_left_ < completions_of(share)) return std::nullopt;
  const std::uint32_t left = std::min(receives_left_, completions_left_ - completions_of(share));
  if (left < kMinReceives) return std::nullopt;
  share.receives = std::clamp(left / kReceivesPart, kMinReceives, kMaxReceivesOfPath);
  completions_left_ -= completions_of(share);
  receives_left_ -= share.receives;
  ++paths_;
  return share;
}

void PathBudget::give_back(const PathShare& share) {
  completions_left_ += completions_of(share);
  receives_left_ += share.receives;
  assert(paths_ > 0);
  --paths_;
}

}  // namespace kvxfer::verbs
