#include "fabric/nic/nic_path.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

#include "cuda/gpus.hpp"
#include "fabric/nic/nic_domain.hpp"

namespace kvxfer {
namespace {

// The send window of a path: so small that no peer holds all of a NIC's time, and that a lost path
// is noticed soon.
constexpr std::uint64_t kWindowBytes = 16u << 20;

}  // namespace

NicPath::NicPath(NicPathIdentity identity, std::uint64_t imm_window, NicLoad& load,
                 ReceiveContext receive_context, NicEvents& events)
    : identity_(std::move(identity)),
      receive_context_(receive_context),
      events_(events),
      imm_window_(imm_window),
      load_(load) {}

bool NicPath::reaches(const Operation& operation) const {
  if (!open_ || lost_ || (operation.nic && *operation.nic != identity_.nic)) return false;
  if (operation.bytes == 0) return true;
  return operation.source->registration(identity_.nic) && operation.destination &&
         operation.destination->key(identity_.id, identity_.remote_nic);
}

bool NicPath::has_room(const Operation&, bool counted) const {
  return outstanding_bytes_ < kWindowBytes &&
         (!counted || imms_sent_ - imms_consumed_ < peer_imm_window_);
}

std::size_t NicPath::batch_limit(const OperationPtr& operation, const WriteRange& writes,
                                 std::size_t limit) const {
  const bool counted = operation->imm && writes.counted;
  return operation->batch(writes, limit, kWindowBytes - std::min(kWindowBytes, outstanding_bytes_),
                          counted ? peer_imm_window_ - (imms_sent_ - imms_consumed_) : UINT64_MAX);
}

const NicPath::Batch& NicPath::add_batch(const OperationPtr& operation, const WriteRange& writes,
                                         std::uint64_t bytes) {
  const std::uint64_t immediates = operation->immediates(writes);
  imms_sent_ += immediates;
  outstanding_bytes_ += bytes;
  load_.bytes += bytes;
  batches_.push_back({++last_sequence_, operation, writes, bytes, immediates});
  return batches_.back();
}

void NicPath::finish_through(std::uint64_t sequence) {
  if (sealed_) return;
  while (!batches_.empty() && batches_.front().sequence <= sequence) {
    Batch batch = std::move(batches_.front());
    batches_.pop_front();
    report(batch);
  }
}

void NicPath::finish(std::uint64_t sequence) {
  if (sealed_ || batches_.empty() || sequence < batches_.front().sequence) return;
  const std::uint64_t index = sequence - batches_.front().sequence;
  if (index >= batches_.size() || !batches_[index].operation) return;
  report(batches_[index]);
  while (!batches_.empty() && !batches_.front().operation) batches_.pop_front();
}

void NicPath::report(Batch& batch) {
  thread_.check("NicPath");
  assert(batch.bytes <= outstanding_bytes_ && outstanding_bytes_ <= load_.bytes);
  outstanding_bytes_ -= batch.bytes;
  load_.bytes -= batch.bytes;
  receive_context_.stats.bytes_sent += batch.bytes;
  receive_context_.stats.writes_sent += batch.writes.count;
  ++receive_context_.activity;
  ++finished_batches_;
  imms_delivered_ += batch.immediates;
  const OperationPtr operation = std::move(batch.operation);
  // A peer that revoked the immediate has forgotten its count.
  if (batch.immediates > 0 && !operation->revoked) {
    delivered_[*operation->imm] += batch.immediates;
  }
  events_.on_finished(operation, batch.writes, {});
}

std::vector<NicPath::Unfinished> NicPath::take_unfinished() {
  thread_.check("NicPath");
  std::vector<Unfinished> unfinished;
  for (Batch& batch : batches_) {
    if (!batch.operation) continue;
    load_.bytes -= batch.bytes;
    unfinished.push_back({std::move(batch.operation), batch.writes});
  }
  batches_.clear();
  outstanding_bytes_ = 0;
  return unfinished;
}

std::size_t NicPath::uncounted(Imm imm) const {
  std::size_t count = 0;
  for (const Batch& batch : batches_) {
    if (batch.operation && batch.operation->imm == imm && !batch.writes.counted) {
      count += batch.writes.count;
    }
  }
  return count;
}

std::uint64_t NicPath::delivered(Imm imm) const {
  const auto found = delivered_.find(imm);
  return found == delivered_.end() ? 0 : found->second;
}

void NicPath::add_credit(std::uint64_t consumed_by_peer) {
  imms_consumed_ = std::clamp(consumed_by_peer, imms_consumed_, imms_sent_);
}

void NicPath::count_immediates(Imm imm, std::uint64_t count) {
  thread_.check("NicPath");
  receive_context_.gpus.after_flush([this, imm, count] { count_seen(imm, count); });
}

void NicPath::end(std::function<void()> then) {
  receive_context_.gpus.after_flush(std::move(then));
}

void NicPath::count_seen(Imm imm, std::uint64_t count) {
  ++receive_context_.activity;
  consumed_ += count;
  if (receive_context_.counters.add(imm, identity_.peer, count)) {
    received_[imm] += count;
    receive_context_.stats.writes_received += count;
  } else {
    receive_context_.stats.writes_refused.count(Errc::stale_counter, count);
    if (std::exchange(refused_, imm) != imm) events_.on_refused(*this, imm);
  }
  if (consumed_ - credited_ >= std::max<std::uint64_t>(imm_window_ / 4, 1)) {
    credited_ = consumed_;
    events_.on_credit_due(*this);
  }
}

void NicPath::lose(Error error) {
  if (lost_) return;
  lost_ = true;
  events_.on_lost(*this, std::move(error));
}

}  // namespace kvxfer
