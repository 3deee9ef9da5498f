// Connections to peers: connects, accepts, and opens the paths over sockets or shared memory.
// Engine thread only, unless said otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/acceptor.hpp"
#include "bootstrap/dialer.hpp"
#include "completion_queue.hpp"
#include "group/fabrics.hpp"
#include "group/peers.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class Connections final : public local::LocalEvents, private AcceptorEvents, private DialerEvents {
 public:
  // The objects that it works with; all outlive it.
  struct Context {
    const EngineOptions& options;
    const Identity& identity;
    Poller& poller;
    Fabrics& fabrics;
    Peers& peers;
    PeerEvents& peer_events;
    OperationBook& operations;
    CompletionQueue& completions;
    EngineStats& stats;
  };

  Connections(std::unique_ptr<Acceptor> acceptor, const Context& context)
      : context_(context), acceptor_(std::move(acceptor)) {}

  // Starts to accept.
  Result<void> start();
  // Connects; Completion::Kind::connect follows.
  void begin(OperationId id, const EngineAddress& address, std::uint64_t deadline_ns);
  // Any thread.
  void complete(OperationId id, const Result<PeerId>& peer);
  // Ends connects and handshakes that took too long. `stalled_ns`: how long this thread did not
  // run.
  void expire(std::uint64_t now, std::uint64_t stalled_ns);
  // True if nothing is under way.
  bool idle() const;
  // Must be the last call.
  void close();

 private:
  void on_accepted(std::unique_ptr<Stream> stream, const Session& session) override;
  void on_lane_hello(UniqueFd socket, const std::string& hello) override;
  void on_handshake_refused(Errc why) override { context_.stats.handshakes_refused.count(why); }
  void on_dialed(Dialer& dialer, Result<Session> session) override;
  void on_lane_dialed(LaneDialer& dialer, Result<UniqueFd> socket) override;
  const Session* find_session(const SessionId& session) override;
  void on_local_link(const SessionId& session, Result<local::LocalLink> link) override;
  void on_stranger_refused(Errc why) override { context_.stats.handshakes_refused.count(why); }

  void open_paths(Peer& peer);
  void open_remote_paths(Peer& peer, const std::string& local_trouble = {});
  bool add_lane(Peer& peer, UniqueFd socket, std::uint32_t lane);
  Peer& add_peer(std::unique_ptr<Stream> stream, const Session& session);
  void limit_opening();
  void note_fallback(const Peer& peer, const std::string& why);

  [[no_unique_address]] ThreadOwner thread_;
  Context context_;
  std::unique_ptr<Acceptor> acceptor_;
  std::vector<std::unique_ptr<Dialer>> dialers_;
  std::vector<std::unique_ptr<LaneDialer>> lane_dialers_;
  bool told_fallback_ = false;
};

}  // namespace kvxfer
