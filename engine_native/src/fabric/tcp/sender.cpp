#include "fabric/tcp/sender.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "error_text.hpp"
#include "fabric/tcp/prefetch.hpp"

namespace kvxfer::tcp {

std::size_t Sender::post(const OperationPtr& operation, const WriteRange& range) {
  const auto& writes = operation->writes;
  const std::size_t first = range.first;
  const bool with_acks = owes_acks();  // in the same system call
  const std::size_t end =
      first + operation->batch(range, kMaxBatchWrites - (with_acks ? 1 : 0), kMaxBatchBytes);
  std::byte* const source = operation->source ? operation->source->data() : nullptr;

  descriptors_.clear();
  iovecs_.clear();
  next_iovec_ = 0;
  if (with_acks) load_acks();
  iovecs_.push_back({&header_, sizeof header_});
  const std::size_t more = iovecs_.size();  // descriptors, once their number is known
  iovecs_.push_back({nullptr, 0});
  std::uint64_t bytes = 0;
  for (std::size_t i = first; i < end; ++i) {
    const WireWrite& write = writes[i];
    if (i > first) descriptors_.push_back({write.destination, write.length, write.grouped});
    if (source && write.length > 0) {
      iovecs_.push_back({source + write.source, write.length});
      prefetch_to_read(source + write.source, write.length);
    }
    bytes += write.length;
  }
  header_ = {.type = static_cast<std::uint8_t>(FrameType::writes),
             .has_imm = operation->imm && range.counted,
             .status = 0,
             .imm = operation->imm.value_or(0),
             .key_or_sequence = operation->destination_key,
             .count = static_cast<std::uint32_t>(end - first),
             .reserved = 0,
             .first = {writes[first].destination, writes[first].length, writes[first].grouped}};
  iovecs_[more] = {descriptors_.data(), descriptors_.size() * sizeof(WriteDescriptor)};
  sending_batch_ = true;
  unacked_.push_back({operation, {first, end - first, range.counted}, bytes});
  unacked_bytes_ += bytes;
  return end - first;
}

void Sender::acknowledge(std::uint64_t sequence, Errc status) {
  // One acknowledgement covers all before it, unless it has to carry a failure.
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
  }
  return {};
}

Result<void> Sender::on_ack(std::uint64_t sequence, Errc status, std::string_view peer,
                            PathEvents& events, EngineStats& stats) {
  const std::size_t sent = unacked_.size() - (sending() && sending_batch_ ? 1 : 0);
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
      stats.writes_sent += batch.writes.count;
    }
    events.on_finished(batch.operation, batch.writes,
                       refused ? refusal(status, *batch.operation, peer) : Error{});
  }
  return {};
}

}  // namespace kvxfer::tcp
