// Holds completions back and shuffles them, as EFA may, so that code that relies on any order among
// them, or between them and anything else, fails on every provider.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "kvxfer/types.hpp"

namespace kvxfer::ofi {

struct Completion {
  std::uint64_t sequence = 0;  // the delivered write, if one of ours
  std::optional<Imm> imm;      // the immediate, if one arrived
  std::uint64_t bytes = 0;
};

class Disorder {
 public:
  explicit Disorder(std::uint64_t seed) : seed_(seed), random_(seed) {}

  std::uint64_t seed() const { return seed_; }
  bool empty() const { return held_.empty(); }
  void hold(const Completion& completion);
  // Returns the completions whose time has come; called at every poll.
  std::vector<Completion> release();
  std::vector<Completion> release_all();

 private:
  struct Held {
    Completion completion;
    unsigned polls;  // polls left to wait
  };

  std::uint64_t seed_;
  std::mt19937_64 random_;
  std::vector<Held> held_;
};

}  // namespace kvxfer::ofi
