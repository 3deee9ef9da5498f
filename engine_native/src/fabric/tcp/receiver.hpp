// The receiving half of a lane. It reads frames and receives payload directly into its pages,
// except bytes that one read returned with the header. Payload for a GPU goes through a staging
// slot; its batch is "placing" until the copies have ended, and batches behind it are counted after
// it.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "cuda/gpu.hpp"
#include "fabric/tcp/wire.hpp"
#include "placement.hpp"

namespace kvxfer::tcp {

// The consumer of finished batches and received acknowledgements.
class FrameSink {
 public:
  virtual void on_batch_done(std::uint64_t sequence, Errc status) = 0;
  virtual Result<void> on_ack(std::uint64_t sequence, Errc status) = 0;

 protected:
  ~FrameSink() = default;
};

class Receiver {
 public:
  Receiver(int fd, PeerId writer, ReceiveContext& receive_context, FrameSink& sink)
      : fd_(fd), writer_(writer), receive_context_(receive_context), sink_(sink) {}

  // Reads what the socket holds, up to a budget that keeps lanes and heartbeats fair. Returns the
  // payload bytes read.
  Result<std::uint64_t> pump();
  // Ends the batches whose copies have ended, in order of arrival.
  void end_placed();
  // True if a GPU still copies, so end_placed() is to be called again, or has no room, so pump()
  // is.
  bool waits_for_gpu() const { return waits_ || !placing_.empty(); }
  bool waits_for_room() const { return waits_; }

  void revoke_counter(Imm imm);
  void revoke_region(std::uint64_t key);

 private:
  // A batch that has arrived.
  struct Placing {
    Placement placement;
    cuda::Ticket copied = 0;  // 0 if it needed no copy
    std::uint32_t writes = 0;
    std::uint64_t immediates = 0;
    std::uint64_t bytes = 0;
  };

  // Returns false if the socket is empty or the GPU has no room.
  Result<bool> read_header();
  Result<bool> read_descriptors();
  Result<bool> read_payload();
  Result<void> begin_batch();
  // Returns false if the GPU has no room for the batch now.
  bool finish_batch();
  void end(Placing& batch);
  void placed(std::size_t size);
  bool granted() const { return placement_->status() == Errc::ok; }
  bool take_slot();
  // Reads from the bytes read ahead, and refills them when they are used up.
  Result<std::size_t> read(void* out, std::size_t size);
  // Returns 0 if the socket is empty.
  Result<std::size_t> receive(std::span<iovec> into);

  enum class State { header, descriptors, payload };

  int fd_;
  PeerId writer_;
  ReceiveContext& receive_context_;
  FrameSink& sink_;

  // Bytes read ahead: one system call reads headers and small writes, because a copy of 4 KiB costs
  // less than a second call.
  std::array<std::byte, 8u << 10> ahead_;
  std::size_t ahead_first_ = 0;
  std::size_t ahead_end_ = 0;
  bool drained_ = false;  // the last read into ahead_ did not fill it

  State state_ = State::header;
  FrameHeader header_{};
  std::size_t got_ = 0;  // bytes received of the header or the descriptors
  std::vector<WriteDescriptor> descriptors_;
  std::uint64_t sequence_ = 0;
  unsigned finished_ = 0;  // batches finished by this pump()

  std::optional<Placement> placement_;
  std::uint64_t batch_bytes_ = 0;
  std::uint64_t batch_immediates_ = 0;
  std::uint64_t unread_ = 0;   // payload bytes of this batch still to be read
  std::vector<iovec> iovecs_;  // destinations of the payload; unused once the batch is refused
  std::size_t next_iovec_ = 0;

  // State of a batch for a GPU.
  std::vector<cuda::DeviceCopy> copies_;  // copies out of the slot, whose address is added later
  std::optional<cuda::StagingSlot> slot_;
  bool waits_ = false;

  std::deque<Placing> placing_;
};

}  // namespace kvxfer::tcp
