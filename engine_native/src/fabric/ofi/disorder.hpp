// Holds completions back and shuffles them, as EFA may: what relies on any order among them, or
// between them and anything else, then fails on every provider.
#pragma once

#include <random>
#include <vector>

#include "fabric/ofi/completion.hpp"

namespace kvxfer::ofi {

class Disorder {
 public:
  explicit Disorder(std::uint64_t seed) : seed_(seed), random_(seed) {}

  std::uint64_t seed() const { return seed_; }
  bool empty() const { return held_.empty(); }
  void hold(const Completion& completion);
  // Those whose time has come; call it at every poll.
  std::vector<Completion> release();
  // All of a path that is being shut.
  std::vector<Completion> release(const CompletionSink& path);

 private:
  struct Held {
    Completion completion;
    unsigned polls;  // left to wait
  };

  std::uint64_t seed_;
  std::mt19937_64 random_;
  std::vector<Held> held_;
};

}  // namespace kvxfer::ofi
