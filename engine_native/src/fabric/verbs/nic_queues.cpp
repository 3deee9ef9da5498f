#include "fabric/verbs/nic_queues.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <string>

#include "error_text.hpp"
#include "fabric/verbs/path_windows.hpp"
#include "fabric/verbs/verbs_path.hpp"
#include "fd.hpp"

namespace kvxfer::verbs {
namespace {

// The most entries that are requested of a NIC. ConnectX has 32,767 receives, rxe 32,767
// completions.
constexpr std::uint32_t kMaxCompletions = 1u << 16;
constexpr std::uint32_t kMaxReceivesOfNic = 32767;
// Events are acknowledged in batches, because acknowledging takes a lock.
constexpr unsigned kAcknowledgeAt = 256;
// The most NicQueues of one NIC: enough for some 6,000 paths on ConnectX.
constexpr std::size_t kMaxQueues = 64;

}  // namespace

Result<std::unique_ptr<NicQueues>> NicQueues::create(std::shared_ptr<const VerbsDevice> device,
                                                     std::uint64_t bits_per_second,
                                                     Poller& poller) {
  std::unique_ptr<NicQueues> queues(new NicQueues(std::move(device), poller));
  const VerbsDevice& of = *queues->device_;
  const auto failed = [&](const char* what) {
    return Error{Errc::fabric_unavailable, "NIC " + of.name() + ": no " + what + ": " +
                                               errno_text() +
                                               "; raise the locked memory limit (ulimit -l)"};
  };
  queues->channel_ = of.library().create_comp_channel(of.context());
  if (!queues->channel_ || !set_nonblocking(queues->channel_->fd)) {
    return failed("completion channel");
  }
  const auto size = std::min(static_cast<std::uint32_t>(of.limits().max_cqe), kMaxCompletions);
  queues->queue_ =
      of.library().create_cq(of.context(), static_cast<int>(size), nullptr, queues->channel_, 0);
  if (!queues->queue_) return failed("completion queue");
  const auto receives =
      std::min(static_cast<std::uint32_t>(of.limits().max_srq_wr), kMaxReceivesOfNic);
  if (size <= kSpareReceives || receives <= kSpareReceives) return failed("room in its queues");
  auto created = ReceiveQueue::create(queues->device_, receives);
  if (!created) return created.error();
  queues->receives_ = std::move(*created);
  const std::uint32_t sends =
      std::min(deep_enough(bits_per_second),
               static_cast<std::uint32_t>(of.limits().max_qp_wr) - PathWindows::kMaxRequests - 1);
  queues->budget_ = PathBudget(size - kSpareReceives, receives - kSpareReceives, sends);
  return queues;
}

Result<void> NicQueues::watch() { return poller_.add(channel_->fd, EPOLLIN, *this); }

NicQueues::~NicQueues() {
  if (channel_) poller_.remove(channel_->fd, *this);
  receives_.reset();
  if (queue_) {
    acknowledge();
    device_->library().destroy_cq(queue_);
  }
  if (channel_) device_->library().destroy_comp_channel(channel_);
}

void NicQueues::take_share(VerbsNic& nic, Taken then) {
  std::size_t paths = 0;
  for (const auto& each : nic.queues) {
    if (const auto share = each->take_share()) return then(Share{each.get(), *share});
    paths += each->paths_.size();
  }
  if (nic.queues.size() >= kMaxQueues) {
    return then(
        Error{Errc::out_of_memory, "NIC " + nic.device->name() + ": its queues are full (" +
                                       std::to_string(paths) +
                                       " paths); connect to fewer peers, or use more NICs"});
  }
  nic.want_queues.push_back(std::move(then));
  if (nic.want_queues.size() > 1) return;  // new queues are being made
  nic.context.background.run<Result<std::unique_ptr<NicQueues>>>(
      [device = nic.device, speed = nic.port.bits_per_second, &poller = nic.context.poller] {
        return create(device, speed, poller);
      },
      [&nic](Result<std::unique_ptr<NicQueues>> made) {
        auto waiting = std::exchange(nic.want_queues, {});
        Result<void> good = made ? (*made)->watch() : Result<void>(made.error());
        if (good) nic.queues.push_back(std::move(*made));
        for (Taken& each : waiting) good ? take_share(nic, std::move(each)) : each(good.error());
      });
}

std::optional<PathShare> NicQueues::take_share() {
  const auto share = budget_.take();
  if (!share || receives_->reserve(share->receives)) return share;
  budget_.give_back(*share);
  return std::nullopt;
}

void NicQueues::give_back(const PathShare& share) {
  receives_->release(share.receives);
  budget_.give_back(share);
}

VerbsPath* NicQueues::find(std::uint32_t queue_pair) const {
  const auto found = paths_.find(queue_pair);
  return found == paths_.end() ? nullptr : found->second;
}

std::size_t NicQueues::poll() {
  thread_.check("NicQueues");
  std::array<ibv_wc, kBatch> done;
  const int polled = ibv_poll_cq(queue_, kBatch, done.data());
  if (polled <= 0) return 0;
  const auto end = done.begin() + polled;
  // Used receives are replaced before any is counted, because counting gives credit for new ones.
  const auto used =
      std::count_if(done.begin(), end, [](const ibv_wc& one) { return one.wr_id == kReceiveId; });
  if (used > 0) receives_->replace(static_cast<std::uint32_t>(used));
  VerbsPath* path = nullptr;
  std::uint32_t number = 0;
  for (auto next = done.begin(); next != end;) {
    const ibv_wc& one = *next++;
    if (!path || one.qp_num != number) {
      number = one.qp_num;
      path = find(number);
    }
    if (!path) continue;
    if (one.status != IBV_WC_SUCCESS) {
      path->on_failed(one);
    } else if (one.wr_id != kReceiveId) {
      path->on_sent(one.wr_id);
    } else if (one.opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
      path->on_failed("it sent a message instead of a write");
    } else {
      std::uint64_t count = 1;
      for (; next != end && next->wr_id == kReceiveId && next->qp_num == number &&
             next->imm_data == one.imm_data && next->status == IBV_WC_SUCCESS &&
             next->opcode == one.opcode;
           ++next) {
        ++count;
      }
      path->on_immediates(ntohl(one.imm_data), count);
    }
  }
  return static_cast<std::size_t>(polled);
}

void NicQueues::drain() {
  thread_.check("NicQueues");
  std::size_t left = static_cast<std::size_t>(queue_->cqe) + 1;
  while (left > 0) {
    const std::size_t polled = poll();
    if (polled == 0) return;
    left -= std::min(left, polled);
  }
}

bool NicQueues::arm() {
  thread_.check("NicQueues");
  if (!armed_) armed_ = ibv_req_notify_cq(queue_, 0) == 0;
  // A completion that came before the queue was armed wakes no thread.
  return poll() == 0;
}

void NicQueues::on_events(std::uint32_t) {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  while (device_->library().get_cq_event(channel_, &queue, &context) == 0) {
    ++unacknowledged_;
    armed_ = false;
  }
  if (unacknowledged_ >= kAcknowledgeAt) acknowledge();
}

void NicQueues::acknowledge() {
  if (unacknowledged_ > 0) device_->library().ack_cq_events(queue_, unacknowledged_);
  unacknowledged_ = 0;
}

}  // namespace kvxfer::verbs
