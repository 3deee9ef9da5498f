// Holds completions back and shuffles them, as EFA may: what relies on any order among them, or
// between them and anything else, then fails on every provider.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "kvxfer/types.hpp"

namespace kvxfer::ofi {

struct Completion {
  std::uint64_t sequence = 0;  // of a write of ours
  std::optional<Imm> imm;      // of one that arrived
  std::uint64_t bytes = 0;
};

class Disorder {
 public:
  explicit Disorder(std::uint64_t seed) : seed_(seed), random_(seed) {}

  std::uint64_t seed() const { return seed_; }
  bool empty() const { return held_.empty(); }
  void hold(const Completion& completion);
  // Those whose time has come; call it at every poll.
  std::vector<Completion> release();
  std::vector<Completion> release_all();

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
