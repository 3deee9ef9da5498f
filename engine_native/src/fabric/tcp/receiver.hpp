// The receiving half of a lane: reads frames and places payload straight into its pages, but for
// what came in one read with the header. Payload for a GPU goes by a staging slot; then the batch
// is "placing" until its copies have ended, and those behind it wait for their turn to be counted.
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

// What the lane does with what was received.
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

  // Reads what is there, up to a budget that keeps lanes and heartbeats fair; how much payload that
  // was.
  Result<std::uint64_t> pump();
  // Ends the batches whose copies have ended, in the order in which they came.
  void end_placed();
  // A GPU is copying: end_placed() is to be called again; or it has no room yet: pump() is.
  bool waits_for_gpu() const { return waits_ || !placing_.empty(); }
  bool waits_for_room() const { return waits_; }

  void revoke_counter(Imm imm);
  void revoke_region(std::uint64_t key);

 private:
  // A batch that has arrived.
  struct Placing {
    Placement placement;
    cuda::Ticket copied = 0;  // 0: it needed no copy
    std::uint32_t writes = 0;
    std::uint64_t immediates = 0;
    std::uint64_t bytes = 0;
  };

  // True: go on; false: the socket is empty.
  Result<bool> read_header();
  Result<bool> read_descriptors();
  Result<bool> read_payload();
  Result<void> begin_batch();
  // False: the GPU has no room for it now.
  bool finish_batch();
  void end(Placing& batch);
  void placed(std::size_t size);
  bool granted() const { return placement_->status() == Errc::ok; }
  bool take_slot();
  // From the bytes read ahead, which it fills once they are used up.
  Result<std::size_t> read(void* out, std::size_t size);
  // 0: the socket is empty.
  Result<std::size_t> receive(std::span<iovec> into);

  enum class State { header, descriptors, payload };

  int fd_;
  PeerId writer_;
  ReceiveContext& receive_context_;
  FrameSink& sink_;

  // Headers and small writes in one system call: a copy of 4 KiB costs less than a second one.
  std::array<std::byte, 8u << 10> ahead_;
  std::size_t ahead_first_ = 0;
  std::size_t ahead_end_ = 0;
  bool drained_ = false;  // the last of these reads got less than it had room for

  State state_ = State::header;
  FrameHeader header_{};
  std::size_t got_ = 0;  // bytes of the header or of the descriptors
  std::vector<WriteDescriptor> descriptors_;
  std::uint64_t sequence_ = 0;
  unsigned finished_ = 0;  // batches, by one pump()

  std::optional<Placement> placement_;
  std::uint64_t batch_bytes_ = 0;
  std::uint64_t batch_immediates_ = 0;
  std::uint64_t unread_ = 0;   // payload bytes of this batch
  std::vector<iovec> iovecs_;  // where they go; not used once the batch is refused
  std::size_t next_iovec_ = 0;

  // Of a batch for a GPU.
  std::vector<cuda::DeviceCopy> copies_;  // out of the slot, whose address is added later
  std::optional<cuda::StagingSlot> slot_;
  bool waits_ = false;

  std::deque<Placing> placing_;
};

}  // namespace kvxfer::tcp
