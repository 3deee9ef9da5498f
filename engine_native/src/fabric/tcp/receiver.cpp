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
constexpr unsigned kPumpBatches = 256;
// The most batches that wait for a GPU; with so many, no more are read.
constexpr std::size_t kMostPlacing = 1024;

Error bad_frame(const std::string& what) {
  return {Errc::protocol_error, "received a malformed frame: " + what};
}

}  // namespace

Result<std::uint64_t> Receiver::pump() {
  finished_ = 0;
  std::uint64_t budget = kPumpBytes;
  drained_ = false;
  waits_ = false;
  // Bytes read ahead are always used up, because no event reports them again.
  while (budget > 0 || ahead_first_ < ahead_end_) {
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
    if (!*more || (finished_ >= kPumpBatches && ahead_first_ == ahead_end_)) break;
  }
  return kPumpBytes - budget;
}

Result<std::size_t> Receiver::receive(std::span<iovec> into) {
  msghdr message{};
  message.msg_iov = into.data();
  message.msg_iovlen = into.size();
  while (true) {
    const ssize_t got = ::recvmsg(fd_, &message, MSG_DONTWAIT);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got == 0) return Error{Errc::peer_lost, "the peer closed the connection"};
    if (errno == EAGAIN) return std::size_t{0};
    if (errno != EINTR) {
      return Error{Errc::peer_lost, std::string("receiving failed: ") + errno_text()};
    }
  }
}

Result<std::size_t> Receiver::read(void* out, std::size_t size) {
  std::size_t taken = 0;
  while (taken < size) {
    if (ahead_first_ == ahead_end_) {
      if (drained_) break;
      iovec all{ahead_.data(), ahead_.size()};
      const auto got = receive({&all, 1});
      if (!got) return got.error();
      drained_ = *got < ahead_.size();
      if (*got == 0) break;
      ahead_first_ = 0;
      ahead_end_ = *got;
    }
    const std::size_t part = std::min(size - taken, ahead_end_ - ahead_first_);
    std::memcpy(static_cast<std::byte*>(out) + taken, &ahead_[ahead_first_], part);
    ahead_first_ += part;
    taken += part;
  }
  return taken;
}

Result<bool> Receiver::read_header() {
  if (placing_.size() >= kMostPlacing) {
    waits_ = true;
    return false;
  }
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
  batch_immediates_ = 0;
  copies_.clear();
  const bool on_gpu = placement_->gpu() != nullptr;
  for (const WriteDescriptor& write : descriptors_) {
    const std::uint64_t target = placement_->target(write.offset, write.length);
    if (target != 0 && write.length > 0 && on_gpu) {
      copies_.push_back({batch_bytes_, target, write.length});
    } else if (target != 0 && write.length > 0) {
      auto* const page = reinterpret_cast<std::byte*>(target);
      iovecs_.push_back({page, write.length});
      prefetch_to_write(page, write.length);
    }
    batch_bytes_ += write.length;
    batch_immediates_ += write.grouped == 0 ? 1 : 0;
  }
  if (batch_bytes_ > kMaxBatchBytes) {
    return bad_frame("a batch of " + std::to_string(batch_bytes_) + " bytes");
  }
  unread_ = batch_bytes_;
  state_ = State::payload;
  if (unread_ == 0) finish_batch();
  return {};
}

// Takes a slot for the whole batch, whose writes follow each other in it.
bool Receiver::take_slot() {
  slot_ = placement_->gpu()->slot_to_receive();
  if (!slot_) return false;
  iovecs_.push_back({slot_->bytes(), batch_bytes_});
  for (cuda::DeviceCopy& copy : copies_) copy.source += slot_->address();
  return true;
}

Result<bool> Receiver::read_payload() {
  if (granted() && placement_->gpu() && !slot_ && !take_slot()) {
    waits_ = true;
    return false;
  }
  if (unread_ == 0) return finish_batch();
  Result<std::size_t> got = std::size_t{0};
  if (ahead_first_ < ahead_end_) {
    const std::size_t most = std::min<std::uint64_t>(unread_, ahead_end_ - ahead_first_);
    if (granted()) {
      const iovec& next = iovecs_[next_iovec_];
      got = read(next.iov_base, std::min(most, next.iov_len));
    } else {  // refused: skip the bytes
      ahead_first_ += most;
      got = most;
    }
  } else {
    std::array<std::byte, kScratchBytes> scratch;
    iovec nowhere{scratch.data(), std::min<std::uint64_t>(unread_, scratch.size())};
    got = receive(granted() ? std::span(iovecs_).subspan(next_iovec_) : std::span(&nowhere, 1));
  }
  if (!got) return got.error();
  if (*got == 0) return false;
  placed(*got);
  return unread_ > 0 || finish_batch();
}

void Receiver::placed(std::size_t size) {
  unread_ -= size;
  while (next_iovec_ < iovecs_.size() && size >= iovecs_[next_iovec_].iov_len) {
    size -= iovecs_[next_iovec_++].iov_len;
  }
  if (size > 0 && next_iovec_ < iovecs_.size()) {
    iovec& partly = iovecs_[next_iovec_];
    partly.iov_base = static_cast<std::byte*>(partly.iov_base) + size;
    partly.iov_len -= size;
  }
}

bool Receiver::finish_batch() {
  cuda::Ticket copied = 0;
  if (granted() && slot_) {
    cuda::Gpu& gpu = *placement_->gpu();
    const auto room = gpu.room();
    if (gpu.failure()) {
      placement_->refuse(Errc::gpu_lost);
    } else if (room.empty()) {
      waits_ = true;
      return false;
    } else {
      std::copy(copies_.begin(), copies_.end(), room.begin());
      copied = gpu.launch(copies_.size());
    }
  }
  Placing batch{.placement = std::move(*placement_),
                .copied = copied,
                .writes = header_.count,
                .immediates = batch_immediates_,
                .bytes = batch_bytes_};
  placement_.reset();
  slot_.reset();
  state_ = State::header;
  ++finished_;
  if (placing_.empty() && copied == 0) {
    end(batch);
  } else {
    placing_.push_back(std::move(batch));
  }
  return true;
}

void Receiver::end_placed() {
  while (!placing_.empty()) {
    Placing& batch = placing_.front();
    if (batch.copied != 0) {
      const cuda::Gpu& gpu = *batch.placement.gpu();
      if (!gpu.ended(batch.copied)) return;
      if (gpu.failure()) batch.placement.refuse(Errc::gpu_lost);
    }
    end(batch);
    placing_.pop_front();
  }
}

void Receiver::end(Placing& batch) {
  batch.placement.finish(batch.writes, batch.immediates, batch.bytes);
  sink_.on_batch_done(++sequence_, batch.placement.status());
}

void Receiver::revoke_counter(Imm imm) {
  if (placement_) placement_->revoke_counter(imm);
  for (Placing& batch : placing_) batch.placement.revoke_counter(imm);
}

void Receiver::revoke_region(std::uint64_t key) {
  if (placement_) placement_->revoke_region(key);
  for (Placing& batch : placing_) batch.placement.revoke_region(key);
}

}  // namespace kvxfer::tcp
