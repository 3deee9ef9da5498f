// The receives of one NIC, shared by its paths: each immediate that arrives uses one up. They have
// no memory; the bytes go where the write says. Engine thread only.
#pragma once

#include <array>
#include <cassert>
#include <memory>

#include "fabric/verbs/verbs_device.hpp"
#include "thread_owner.hpp"

namespace kvxfer::verbs {

// wr_id of every receive.
inline constexpr std::uint64_t kReceiveId = UINT64_MAX;
// Posted beyond what the paths have reserved: a queue pair that fails may keep one for itself.
inline constexpr std::uint32_t kSpareReceives = 64;

class ReceiveQueue {
 public:
  static Result<std::unique_ptr<ReceiveQueue>> create(std::shared_ptr<const VerbsDevice> device,
                                                      std::uint32_t capacity);
  ~ReceiveQueue();
  ReceiveQueue(const ReceiveQueue&) = delete;
  ReceiveQueue& operator=(const ReceiveQueue&) = delete;

  ibv_srq* get() const { return queue_; }
  // False if they cannot be posted.
  bool reserve(std::uint32_t receives);
  void release(std::uint32_t receives) {
    assert(receives <= wanted_ - kSpareReceives);
    wanted_ -= receives;
  }
  // So many were used up; to be called before anybody gets credit for them.
  void replace(std::uint32_t used);
  // The NIC has fewer than were posted: some were lost with their queue pairs.
  void on_limit_reached();

 private:
  explicit ReceiveQueue(std::shared_ptr<const VerbsDevice> device);
  bool post_missing();
  void arm_limit();

  static constexpr std::size_t kChain = 64;

  [[no_unique_address]] ThreadOwner thread_;
  std::shared_ptr<const VerbsDevice> device_;
  ibv_srq* queue_ = nullptr;
  std::uint32_t wanted_ = kSpareReceives;
  std::uint32_t posted_ = 0;
  std::array<ibv_recv_wr, kChain> chain_{};
};

}  // namespace kvxfer::verbs
