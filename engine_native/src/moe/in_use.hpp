// Asserts that calls do not overlap.
#pragma once

#include <atomic>
#include <cassert>

namespace kvxfer::moe {

class InUse {
 public:
  explicit InUse(std::atomic<bool>& by_a_call) : by_a_call_(by_a_call) {
    [[maybe_unused]] const bool overlaps = by_a_call_.exchange(true);
    assert(!overlaps);
  }
  ~InUse() { by_a_call_ = false; }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

 private:
  std::atomic<bool>& by_a_call_;
};

}  // namespace kvxfer::moe
