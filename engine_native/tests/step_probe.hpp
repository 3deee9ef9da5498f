// A NIC that carries nothing and times the engine thread: each of its steps polls every NIC once.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "fabric/nic/nic_domain.hpp"

namespace kvxfer::test {

// How long the calling thread has run or been blocked: time, in nanoseconds, without that which it
// waited for a processor. Differences count. Costs a microsecond.
std::uint64_t thread_time_ns();

class StepProbe final : public NicFactory {
 public:
  // Of the calling thread so far: how long it was held up by what tests put in the place of a NIC.
  using HeldUpNs = std::uint64_t (*)();

  // `others`: the NICs that the engine has besides.
  StepProbe(std::shared_ptr<NicFactory> others, HeldUpNs held_up)
      : others_(std::move(others)), held_up_(held_up) {}

  Result<OpenedNics> open(const NicContext& context) override;
  // Of all steps so far, without the time that the thread waited for a processor or was held up.
  std::uint64_t longest_ns() const { return *longest_ns_; }

 private:
  std::shared_ptr<NicFactory> others_;
  HeldUpNs held_up_;
  std::shared_ptr<std::atomic<std::uint64_t>> longest_ns_ =
      std::make_shared<std::atomic<std::uint64_t>>(0);
};

}  // namespace kvxfer::test
