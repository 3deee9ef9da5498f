#include "fabric/ofi/disorder.hpp"

#include <algorithm>
#include <utility>

namespace kvxfer::ofi {
namespace {

// One completion in kHeldOneIn waits, for fewer than kMostPolls polls.
constexpr unsigned kHeldOneIn = 4;
constexpr unsigned kMostPolls = 32;

}  // namespace

void Disorder::hold(const Completion& completion) {
  const bool waits = random_() % kHeldOneIn == 0;
  held_.push_back({completion, waits ? static_cast<unsigned>(random_() % kMostPolls) : 0});
}

std::vector<Completion> Disorder::release() {
  std::vector<Completion> due;
  std::erase_if(held_, [&](Held& held) {
    if (held.polls-- > 0) return false;
    due.push_back(held.completion);
    return true;
  });
  std::shuffle(due.begin(), due.end(), random_);
  return due;
}

std::vector<Completion> Disorder::release_all() {
  std::vector<Completion> all;
  for (const Held& held : std::exchange(held_, {})) all.push_back(held.completion);
  std::shuffle(all.begin(), all.end(), random_);
  return all;
}

}  // namespace kvxfer::ofi
