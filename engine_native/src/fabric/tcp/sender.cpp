#include "fabric/tcp/sender.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "error_text.hpp"
#include "fabric/tcp/prefetch.hpp"

namespace kvxfer::tcp {

FrameHeader Sender::header_of(const Operation& operation, const WriteRange& batch) const {
  const WireWrite& first = operation.writes[batch.first];
  return {.type = static_cast<std::uint8_t>(FrameType::writes),
          .has_imm = operation.names_imm(batch, peer_knows_groups_),
          .status = 0,
          .imm = operation.imm.value_or(0),
          .key_or_sequence = operation.destination_key,
          .count = static_cast<std::uint32_t>(batch.count),
          .reserved = 0,
          .first = {first.destination, first.length, Operation::grouped(batch, first)}};
}

std::size_t Sender::post(const OperationPtr& operation, const WriteRange& range) {
  if (operation->source && operation->source->gpu()) return stage(operation, range);
  const auto& writes = operation->writes;
  const std::size_t first = range.first;
  const bool with_acks = owes_acks();  // sent in the same system call
  const std::size_t count =
      operation->batch(range, kMaxBatchWrites - (with_acks ? 1 : 0), kMaxBatchBytes);
  const std::byte* const source = operation->source ? operation->source->host() : nullptr;
  const WriteRange batch{first, count, range.counted};

  descriptors_.clear();
  iovecs_.clear();
  next_iovec_ = 0;
  if (with_acks) load_acks();
  iovecs_.push_back({&header_, sizeof header_});
  const std::size_t more = iovecs_.size();  // index of the descriptors, set below
  iovecs_.push_back({nullptr, 0});
  std::uint64_t bytes = 0;
  for (std::size_t i = first; i < first + count; ++i) {
    const WireWrite& write = writes[i];
    if (i > first) {
      descriptors_.push_back({write.destination, write.length, Operation::grouped(batch, write)});
    }
    if (source && write.length > 0) {
      iovecs_.push_back({const_cast<std::byte*>(source) + write.source, write.length});
      prefetch_to_read(source + write.source, write.length);
    }
    bytes += write.length;
  }
  header_ = header_of(*operation, batch);
  iovecs_[more] = {descriptors_.data(), descriptors_.size() * sizeof(WriteDescriptor)};
  sending_batch_ = true;
  unacked_.push_back({operation, batch, bytes});
  unacked_bytes_ += bytes;
  return count;
}

static_assert(kMaxBatchBytes <= cuda::kSlotBytes);

// --- out of a GPU ----------------------------------------------------------------------------

std::size_t Sender::stage(const OperationPtr& operation, const WriteRange& range) {
  const MemoryRegion& source = *operation->source;
  const auto room = source.gpu()->room();
  if (room.empty()) return 0;
  auto slot = source.gpu()->slot_to_send();
  if (!slot) return 0;
  const std::size_t count = operation->batch(range, kMaxBatchWrites - 1, kMaxBatchBytes);
  const WriteRange batch{range.first, count, range.counted};
  std::vector<WriteDescriptor> descriptors;
  descriptors.reserve(count);
  std::size_t copies = 0;
  std::uint64_t bytes = 0;
  for (const WireWrite& write : operation->writes.subspan(batch.first, count)) {
    descriptors.push_back({write.destination, write.length, Operation::grouped(batch, write)});
    if (write.length == 0) continue;
    room[copies++] = {source.address() + write.source, slot->address() + bytes, write.length};
    bytes += write.length;
  }
  descriptors.erase(descriptors.begin());
  staged_.push_back({.header = header_of(*operation, batch),
                     .descriptors = std::move(descriptors),
                     .slot = std::move(*slot),
                     .bytes = bytes,
                     .gpu = source.gpu(),
                     .copied = copies > 0 ? source.gpu()->launch(copies) : 0});
  unacked_.push_back({operation, batch, bytes, true});
  unacked_bytes_ += bytes;
  return count;
}

bool Sender::may_send_staged() const {
  if (sending() || !staging()) return false;
  const Staged& next = staged_.front();
  return !next.gpu->failure() && next.gpu->ended(next.copied);
}

void Sender::drop_lost(PathEvents& events) {
  while (staging() && staged_.front().gpu->failure()) {
    // The first batch that was not sent.
    const auto lost = unacked_.end() - static_cast<std::ptrdiff_t>(staged_.size());
    const Batch batch = std::move(*lost);
    unacked_.erase(lost);
    unacked_bytes_ -= batch.bytes;
    const Error why = *staged_.front().gpu->failure();
    staged_.pop_front();
    events.on_finished(batch.operation, batch.writes, why);
  }
}

void Sender::send_staged() {
  Staged& next = staged_.front();
  iovecs_.clear();
  next_iovec_ = 0;
  if (owes_acks()) load_acks();
  header_ = next.header;
  descriptors_ = std::move(next.descriptors);
  sending_slot_ = std::move(next.slot);
  iovecs_.push_back({&header_, sizeof header_});
  iovecs_.push_back({descriptors_.data(), descriptors_.size() * sizeof(WriteDescriptor)});
  iovecs_.push_back({sending_slot_->bytes(), next.bytes});
  sending_batch_ = true;
  staged_.pop_front();
}

// --- acknowledgements ------------------------------------------------------------------------

void Sender::acknowledge(std::uint64_t sequence, Errc status) {
  // One acknowledgement covers all batches before it; after one that carries a failure, the next
  // begins.
  if (!acks_.empty() && acks_.back().status == 0) {
    acks_.back().key_or_sequence = sequence;
    acks_.back().status = static_cast<std::uint16_t>(status);
    return;
  }
  FrameHeader ack{};
  ack.type = static_cast<std::uint8_t>(FrameType::ack);
  ack.status = static_cast<std::uint16_t>(status);
  ack.key_or_sequence = sequence;
  acks_.push_back(ack);
}

void Sender::load_acks() {
  sending_batch_ = false;
  sending_acks_.clear();
  std::swap(sending_acks_, acks_);
  iovecs_.assign(1, {sending_acks_.data(), sending_acks_.size() * sizeof(FrameHeader)});
  next_iovec_ = 0;
}

Result<void> Sender::flush() {
  while (blocked()) {
    if (!sending()) load_acks();
    msghdr message{};
    message.msg_iov = &iovecs_[next_iovec_];
    message.msg_iovlen = iovecs_.size() - next_iovec_;
    const ssize_t sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return {};
      return Error{Errc::peer_lost, std::string("sending failed: ") + errno_text()};
    }
    auto left = static_cast<std::size_t>(sent);
    while (sending() && left >= iovecs_[next_iovec_].iov_len) {
      left -= iovecs_[next_iovec_++].iov_len;
    }
    if (left > 0) {
      iovec& partly = iovecs_[next_iovec_];
      partly.iov_base = static_cast<std::byte*>(partly.iov_base) + left;
      partly.iov_len -= left;
    }
    if (!sending()) sending_slot_.reset();  // other batches wait for the slot
  }
  return {};
}

Result<void> Sender::on_ack(std::uint64_t sequence, Errc status, std::string_view peer,
                            PathEvents& events, EngineStats& stats) {
  const std::size_t sent = unacked_.size() - staged_.size() - (sending() && sending_batch_ ? 1 : 0);
  if (sequence <= last_acked_ || sequence - last_acked_ > sent) {
    return Error{Errc::protocol_error, "an acknowledgement for a batch that was never sent"};
  }
  while (last_acked_ < sequence) {
    const Batch batch = std::move(unacked_.front());
    unacked_.pop_front();
    unacked_bytes_ -= batch.bytes;
    ++last_acked_;
    const bool refused = last_acked_ == sequence && status != Errc::ok;
    if (!refused) {
      stats.bytes_sent += batch.bytes;
      if (batch.staged) stats.bytes_staged += batch.bytes;
      stats.writes_sent += batch.writes.count;
    }
    events.on_finished(batch.operation, batch.writes,
                       refused ? refusal(status, *batch.operation, peer) : Error{});
  }
  return {};
}

}  // namespace kvxfer::tcp
