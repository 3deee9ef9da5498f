// The sending half of a lane: batches of writes straight from their pages, and acknowledgements.
// Pages of a GPU are copied to a staging slot first; batches go out in the order of their posting.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "cuda/gpu.hpp"
#include "domain.hpp"
#include "fabric/tcp/wire.hpp"
#include "refusal.hpp"

namespace kvxfer::tcp {

class Sender {
 public:
  Sender(int fd, bool peer_knows_groups, std::size_t window_bytes)
      : fd_(fd), peer_knows_groups_(peer_knows_groups), window_bytes_(window_bytes) {}

  bool has_room(const Operation& operation) const {
    if (unacked_bytes_ >= window_bytes_) return false;
    const bool on_gpu = operation.source && operation.source->gpu();
    return on_gpu ? staged_.size() < kMostStaged : !sending() && !staging();
  }
  // Returns the number of acknowledgements to be written, and of those last given to the socket.
  std::size_t acks_waiting() const { return acks_.size() + sending_acks_.size(); }
  // True if acknowledgements wait to be given to the socket.
  bool owes_acks() const { return !acks_.empty(); }
  // True if bytes wait for the socket to become writable.
  bool blocked() const { return sending() || !acks_.empty(); }

  // Posts the first of these writes as one batch. Returns their number, 0 if there is no room.
  std::size_t post(const OperationPtr& operation, const WriteRange& writes);
  // True if batches wait for a GPU, or to be sent after its copy.
  bool staging() const { return !staged_.empty(); }
  // True if send_staged() may be called: the next staged batch is copied, and nothing is being
  // sent.
  bool may_send_staged() const;
  void send_staged();
  // Fails the staged batches whose GPU has failed, without sending them.
  void drop_lost(PathEvents& events);
  void acknowledge(std::uint64_t sequence, Errc status);
  // Writes until everything is out or the socket is full.
  Result<void> flush();

  // Handles an acknowledgement: the peer finished all batches up to `sequence`, the last one with
  // `status`.
  Result<void> on_ack(std::uint64_t sequence, Errc status, std::string_view peer,
                      PathEvents& events, EngineStats& stats);

 private:
  struct Batch {
    OperationPtr operation;
    WriteRange writes;
    std::uint64_t bytes;
    bool staged = false;
  };

  // A batch that is copied, or being copied, out of a GPU. Staged batches are the last of unacked_.
  struct Staged {
    FrameHeader header;
    std::vector<WriteDescriptor> descriptors;
    cuda::StagingSlot slot;
    std::size_t bytes;
    std::shared_ptr<cuda::Gpu> gpu;
    cuda::Ticket copied;
  };
  static constexpr std::size_t kMostStaged = 2;

  bool sending() const { return next_iovec_ < iovecs_.size(); }
  void load_acks();
  std::size_t stage(const OperationPtr& operation, const WriteRange& writes);
  FrameHeader header_of(const Operation& operation, const WriteRange& batch) const;

  int fd_;
  bool peer_knows_groups_;
  std::size_t window_bytes_;

  // The frame, or the run of acks, that is being written.
  FrameHeader header_{};
  std::vector<WriteDescriptor> descriptors_;
  std::vector<FrameHeader> sending_acks_;
  std::vector<iovec> iovecs_;
  std::size_t next_iovec_ = 0;
  bool sending_batch_ = false;  // a batch is being written, not only acks
  std::optional<cuda::StagingSlot> sending_slot_;
  std::deque<Staged> staged_;

  std::vector<FrameHeader> acks_;  // written before or between batches
  std::deque<Batch> unacked_;      // ordered by sequence
  std::uint64_t last_acked_ = 0;   // sequence of the batch before unacked_.front()
  std::uint64_t unacked_bytes_ = 0;
};

}  // namespace kvxfer::tcp
