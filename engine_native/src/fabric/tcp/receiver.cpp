#include "fabric/tcp/receiver.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "error_text.hpp"
#include "fabric/tcp/prefetch.hpp"

namespace kvxfer::tcp {
namespace {

constexpr std::size_t kScratchBytes = 64u << 10;
constexpr std::uint64_t kPumpBytes = 4u << 20;

Error bad_frame(const std::string& what) {
  return {Errc::protocol_error, "received a malformed frame: " + what};
}

}  // namespace

Result<void> Receiver::pump() {
  const std::uint64_t first = sequence_;
  std::uint64_t budget = kPumpBytes;
  while (budget > 0) {
    const std::uint64_t before = unread_;
    Result<bool> more = true;
    switch (state_) {
      case State::header:
        more = read_header();
        break;
      case State::descriptors:
        more = read_descriptors();
        break;
      case State::payload:
        more = read_payload();
        budget -= std::min(budget, before - unread_);
        break;
    }
    if (!more) return more.error();
    if (!*more || sequence_ - first >= 256) break;
  }
  return {};
}

Result<std::size_t> Receiver::read(void* out, std::size_t size) {
  while (true) {
    const ssize_t got = ::recv(fd_, out, size, MSG_DONTWAIT);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got == 0) return Error{Errc::peer_lost, "the peer closed the connection"};
    if (errno == EAGAIN) return std::size_t{0};
    if (errno != EINTR) {
      return Error{Errc::peer_lost, std::string("receiving failed: ") + errno_text()};
    }
  }
}

Result<bool> Receiver::read_header() {
  auto got = read(reinterpret_cast<std::byte*>(&header_) + got_, sizeof header_ - got_);
  if (!got) return got.error();
  got_ += *got;
  if (got_ < sizeof header_) return false;
  got_ = 0;
  if (header_.type == static_cast<std::uint8_t>(FrameType::ack)) {
    if (auto good = sink_.on_ack(header_.key_or_sequence, static_cast<Errc>(header_.status));
        !good) {
      return good.error();
    }
    return true;
  }
  if (header_.type != static_cast<std::uint8_t>(FrameType::writes)) {
    return bad_frame("type " + std::to_string(header_.type));
  }
  if (header_.count == 0 || header_.count > kMaxBatchWrites) {
    return bad_frame("a batch of " + std::to_string(header_.count) + " writes");
  }
  descriptors_.resize(header_.count);
  descriptors_[0] = header_.first;
  if (header_.count > 1) {
    state_ = State::descriptors;
    return true;
  }
  if (auto good = begin_batch(); !good) return good.error();
  return true;
}

Result<bool> Receiver::read_descriptors() {
  const std::size_t size = (descriptors_.size() - 1) * sizeof(WriteDescriptor);
  auto got = read(reinterpret_cast<std::byte*>(&descriptors_[1]) + got_, size - got_);
  if (!got) return got.error();
  got_ += *got;
  if (got_ < size) return false;
  got_ = 0;
  if (auto good = begin_batch(); !good) return good.error();
  return true;
}

Result<void> Receiver::begin_batch() {
  placement_.emplace(receive_context_, writer_, header_.key_or_sequence,
                     header_.has_imm ? std::optional<Imm>(header_.imm) : std::nullopt);
  iovecs_.clear();
  next_iovec_ = 0;
  batch_bytes_ = 0;
  for (const WriteDescriptor& write : descriptors_) {
    batch_bytes_ += write.length;
    std::byte* const target = placement_->target(write.offset, write.length);
    if (target && write.length > 0) {
      iovecs_.push_back({target, write.length});
      prefetch_to_write(target, write.length);
    }
  }
  if (batch_bytes_ > kMaxBatchBytes) {
    return bad_frame("a batch of " + std::to_string(batch_bytes_) + " bytes");
  }
  unread_ = batch_bytes_;
  state_ = State::payload;
  if (unread_ == 0) finish_batch();
  return {};
}

Result<bool> Receiver::read_payload() {
  ssize_t got = 0;
  if (placement_->status() == Errc::ok) {
    msghdr message{};
    message.msg_iov = &iovecs_[next_iovec_];
    message.msg_iovlen = iovecs_.size() - next_iovec_;
    got = ::recvmsg(fd_, &message, MSG_DONTWAIT);
  } else {
    std::array<std::byte, kScratchBytes> scratch;  // refused: nobody reads it
    got =
        ::recv(fd_, scratch.data(), std::min<std::uint64_t>(unread_, scratch.size()), MSG_DONTWAIT);
  }
  if (got == 0) return Error{Errc::peer_lost, "the peer closed the connection"};
  if (got < 0) {
    if (errno == EAGAIN) return false;
    if (errno == EINTR) return true;
    return Error{Errc::peer_lost, std::string("receiving failed: ") + errno_text()};
  }
  unread_ -= static_cast<std::uint64_t>(got);
  auto left = static_cast<std::size_t>(got);
  while (next_iovec_ < iovecs_.size() && left >= iovecs_[next_iovec_].iov_len) {
    left -= iovecs_[next_iovec_++].iov_len;
  }
  if (left > 0 && next_iovec_ < iovecs_.size()) {
    iovec& partly = iovecs_[next_iovec_];
    partly.iov_base = static_cast<std::byte*>(partly.iov_base) + left;
    partly.iov_len -= left;
  }
  if (unread_ == 0) finish_batch();
  return true;
}

void Receiver::finish_batch() {
  placement_->finish(header_.count, batch_bytes_);
  const Errc status = placement_->status();
  placement_.reset();
  state_ = State::header;
  sink_.on_batch_done(++sequence_, status);
}

void Receiver::revoke_counter(Imm imm) {
  if (placement_) placement_->revoke_counter(imm);
}

void Receiver::revoke_region(std::uint64_t key) {
  if (placement_) placement_->revoke_region(key);
}

}  // namespace kvxfer::tcp
