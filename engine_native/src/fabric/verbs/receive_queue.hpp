// A shared receive queue of a NIC. Each immediate that arrives uses up one receive. Receives have
// no memory, because the write says where its bytes go. Engine thread only.
#pragma once

#include <array>
#include <cassert>
#include <memory>

#include "fabric/verbs/verbs_device.hpp"
#include "thread_owner.hpp"

namespace kvxfer::verbs {

// The wr_id of every receive.
inline constexpr std::uint64_t kReceiveId = UINT64_MAX;
// Receives posted beyond those that paths reserve: a queue pair that fails may keep one.
inline constexpr std::uint32_t kSpareReceives = 64;

class ReceiveQueue {
 public:
  static Result<std::unique_ptr<ReceiveQueue>> create(std::shared_ptr<const VerbsDevice> device,
                                                      std::uint32_t capacity);
  ~ReceiveQueue();
  ReceiveQueue(const ReceiveQueue&) = delete;
  ReceiveQueue& operator=(const ReceiveQueue&) = delete;

  ibv_srq* get() const { return queue_; }
  // Posts receives for a path. Returns false if they cannot be posted.
  bool reserve(std::uint32_t receives);
  void release(std::uint32_t receives) {
    assert(receives <= wanted_ - kSpareReceives);
    wanted_ -= receives;
  }
  // Replaces used receives; to be called before peers get credit for them.
  void replace(std::uint32_t used);
  // Replaces receives that were lost with their queue pairs, when the NIC reports that few are
  // left.
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
