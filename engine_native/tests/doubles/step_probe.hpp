// A NIC that carries nothing and times the engine thread, whose steps poll every NIC once.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "fabric/nic/nic_domain.hpp"

namespace kvxfer::test {

// The nanoseconds that the calling thread has run or been blocked, without those in which it waited
// for a processor. Only differences are meaningful. A call costs a microsecond.
std::uint64_t thread_time_ns();

class StepProbe final : public NicFactory {
 public:
  // The time so far that a stand-in for a NIC has held the calling thread up.
  using HeldUpNs = std::uint64_t (*)();

  // `others` are the engine's other NICs.
  StepProbe(std::shared_ptr<NicFactory> others, HeldUpNs held_up)
      : others_(std::move(others)), held_up_(held_up) {}

  Result<OpenedNics> open(const NicContext& context) override;
  // The longest step so far, without the time that the thread waited for a processor or was held
  // up.
  std::uint64_t longest_ns() const { return *longest_ns_; }

 private:
  std::shared_ptr<NicFactory> others_;
  HeldUpNs held_up_;
  std::shared_ptr<std::atomic<std::uint64_t>> longest_ns_ =
      std::make_shared<std::atomic<std::uint64_t>>(0);
};

}  // namespace kvxfer::test
