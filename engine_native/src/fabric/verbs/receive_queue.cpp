#include "fabric/verbs/receive_queue.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

#include "error_text.hpp"

namespace kvxfer::verbs {

Result<std::unique_ptr<ReceiveQueue>> ReceiveQueue::create(
    std::shared_ptr<const VerbsDevice> device, std::uint32_t capacity) {
  std::unique_ptr<ReceiveQueue> receives(new ReceiveQueue(std::move(device)));
  const VerbsDevice& of = *receives->device_;
  ibv_srq_init_attr wanted{.attr = {.max_wr = capacity, .max_sge = 1}};
  receives->queue_ = of.library().create_srq(of.pd(), &wanted);
  if (!receives->queue_ || !receives->post_missing()) {
    return Error{Errc::fabric_unavailable, "NIC " + of.name() +
                                               ": no shared receive queue: " + errno_text() +
                                               "; raise the locked memory limit (ulimit -l)"};
  }
  receives->arm_limit();
  return receives;
}

ReceiveQueue::ReceiveQueue(std::shared_ptr<const VerbsDevice> device) : device_(std::move(device)) {
  for (std::size_t i = 0; i < kChain; ++i) {
    chain_[i].wr_id = kReceiveId;
    chain_[i].next = i + 1 < kChain ? &chain_[i + 1] : nullptr;
  }
}

ReceiveQueue::~ReceiveQueue() {
  assert(wanted_ == kSpareReceives);
  if (queue_) device_->library().destroy_srq(queue_);
}

bool ReceiveQueue::reserve(std::uint32_t receives) {
  wanted_ += receives;
  if (post_missing()) return true;
  wanted_ -= receives;
  return false;
}

void ReceiveQueue::replace(std::uint32_t used) {
  thread_.check("ReceiveQueue");
  posted_ -= std::min(posted_, used);
  post_missing();
}

bool ReceiveQueue::post_missing() {
  while (posted_ < wanted_) {
    const std::uint32_t count = std::min<std::uint32_t>(wanted_ - posted_, kChain);
    // Cuts the chain behind the last request, for this call.
    ibv_recv_wr& last = chain_[count - 1];
    ibv_recv_wr* const rest = std::exchange(last.next, nullptr);
    ibv_recv_wr* refused = nullptr;
    errno = ibv_post_srq_recv(queue_, chain_.data(), &refused);
    last.next = rest;
    if (errno != 0) {
      posted_ += static_cast<std::uint32_t>(refused - chain_.data());
      return false;
    }
    posted_ += count;
  }
  return true;
}

void ReceiveQueue::on_limit_reached() {
  thread_.check("ReceiveQueue");
  posted_ -= std::min(posted_, kSpareReceives / 2);
  post_missing();
  arm_limit();
}

void ReceiveQueue::arm_limit() {
  ibv_srq_attr limit{.srq_limit = kSpareReceives / 2};
  device_->library().modify_srq(queue_, &limit, IBV_SRQ_LIMIT);
}

}  // namespace kvxfer::verbs
