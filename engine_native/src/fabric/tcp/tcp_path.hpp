// One lane: an authenticated TCP connection between two tcp domains.
#pragma once

#include <string>
#include <vector>

#include "domain.hpp"
#include "fabric/tcp/receiver.hpp"
#include "fabric/tcp/sender.hpp"
#include "fd.hpp"
#include "poller.hpp"
#include "thread_owner.hpp"

namespace kvxfer::tcp {

class TcpPath;

// The paths of a domain that have work at its next poll: acknowledgements to send, unless the
// path's next batch takes them along, or batches that wait for a GPU.
struct DuePaths {
  std::vector<TcpPath*> owing;
  std::vector<TcpPath*> copying;
};

class TcpPath final : public Path, private EventSink, private FrameSink {
 public:
  // Takes over a connected, authenticated, non-blocking socket.
  static Result<std::unique_ptr<TcpPath>> open(UniqueFd socket, PathPeer peer,
                                               std::size_t window_bytes, Poller& poller,
                                               DuePaths& due, ReceiveContext receive_context,
                                               PathEvents& events);
  ~TcpPath() override;

  std::string_view fabric() const override { return "tcp"; }
  PathRank rank() const override { return PathRank::tcp; }
  bool reaches(const Operation& operation) const override { return !operation.nic; }
  bool has_room(const Operation& operation, bool) const override {
    return !lost_ && sender_.has_room(operation);
  }
  std::size_t post(const OperationPtr& operation, const WriteRange& writes) override;
  void send_acks();
  // Continues with batches that a GPU has copied.
  void step();
  void tick(std::uint64_t now, std::uint64_t stalled_ns, std::uint64_t timeout_ns) override;
  std::uint64_t last_heard_ns() const override { return last_heard_ns_; }
  void revoke_counter(Imm imm) override { receiver_.revoke_counter(imm); }
  void revoke_region(std::uint64_t key) override { receiver_.revoke_region(key); }

 private:
  TcpPath(UniqueFd socket, PathPeer peer, std::size_t window_bytes, Poller& poller, DuePaths& due,
          ReceiveContext receive_context, PathEvents& events);

  void on_events(std::uint32_t events) override;
  void on_batch_done(std::uint64_t sequence, Errc status) override;
  Result<void> on_ack(std::uint64_t sequence, Errc status) override;
  void flush();
  // Returns false if the path is lost.
  bool receive(std::uint64_t& read);
  void owe();
  void note_copies();
  void lose(const Error& error);

  [[no_unique_address]] ThreadOwner thread_;
  UniqueFd socket_;
  PathPeer peer_;
  Poller& poller_;
  DuePaths& due_;
  ReceiveContext receive_context_;
  PathEvents& events_;
  Sender sender_;
  Receiver receiver_;
  bool waiting_for_room_ = false;  // EPOLLOUT is armed
  bool owes_ = false;              // the path is in due_.owing
  bool copies_ = false;            // the path is in due_.copying
  std::uint64_t last_heard_ns_ = 0;
  // The last time when the peer's host acknowledged bytes, or none were under way.
  std::uint64_t acknowledged_ns_ = 0;
  bool lost_ = false;
};

}  // namespace kvxfer::tcp
