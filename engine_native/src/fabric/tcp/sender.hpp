// The sending half of a lane: batches of writes straight from their pages, and acknowledgements.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "domain.hpp"
#include "fabric/tcp/wire.hpp"
#include "refusal.hpp"

namespace kvxfer::tcp {

class Sender {
 public:
  Sender(int fd, std::size_t window_bytes) : fd_(fd), window_bytes_(window_bytes) {}

  bool has_room() const { return !sending() && unacked_bytes_ < window_bytes_; }
  // Of the peer's batches, as far as it has not read them.
  std::size_t acks_waiting() const { return acks_.size() + sending_acks_.size(); }
  // Whether some of them were not given to the socket yet.
  bool owes_acks() const { return !acks_.empty(); }
  // Whether bytes wait for the socket to become writable.
  bool blocked() const { return sending() || !acks_.empty(); }

  // Posts the first of these writes as one batch; returns how many.
  std::size_t post(const OperationPtr& operation, const WriteRange& writes);
  void acknowledge(std::uint64_t sequence, Errc status);
  // Writes until everything is out or the socket is full.
  Result<void> flush();

  // The peer finished all batches up to `sequence`; the last one with `status`.
  Result<void> on_ack(std::uint64_t sequence, Errc status, std::string_view peer,
                      PathEvents& events, EngineStats& stats);

 private:
  struct Batch {
    OperationPtr operation;
    WriteRange writes;
    std::uint64_t bytes;
  };

  bool sending() const { return next_iovec_ < iovecs_.size(); }
  void load_acks();

  int fd_;
  std::size_t window_bytes_;

  // The frame, or the run of acks, that is being written.
  FrameHeader header_{};
  std::vector<WriteDescriptor> descriptors_;
  std::vector<FrameHeader> sending_acks_;
  std::vector<iovec> iovecs_;
  std::size_t next_iovec_ = 0;
  bool sending_batch_ = false;  // not acks

  std::vector<FrameHeader> acks_;  // to be written before or between batches
  std::deque<Batch> unacked_;      // in order of sequence
  std::uint64_t last_acked_ = 0;   // sequence of the batch before unacked_.front()
  std::uint64_t unacked_bytes_ = 0;
};

}  // namespace kvxfer::tcp
