// The NICs that serve one GPU (or one host), and the thread that drives them.
//
// All state below "engine thread" is touched by that thread alone; other threads hand it commands.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "bootstrap/acceptor.hpp"
#include "bootstrap/dialer.hpp"
#include "completion_queue.hpp"
#include "domain.hpp"
#include "fabric/local/local_domain.hpp"
#include "fabric/tcp/tcp_domain.hpp"
#include "imm_counter.hpp"
#include "kvxfer/types.hpp"
#include "memory_region.hpp"
#include "peer.hpp"
#include "poller.hpp"

namespace kvxfer {

class DomainGroup final : private AcceptorEvents,
                          private DialerEvents,
                          private local::LocalEvents,
                          private PathEvents,
                          private PeerEvents {
 public:
  static Result<std::unique_ptr<DomainGroup>> open(EngineOptions options);
  ~DomainGroup();

  // --- any thread
  const EngineAddress& address() const { return address_; }
  const EngineOptions& options() const { return options_; }
  CompletionQueue& completions() { return *completions_; }
  ImmCounters& counters() { return counters_; }
  RegionTable& regions() { return regions_; }
  OperationId next_operation_id() { return ++last_operation_; }
  std::shared_ptr<PeerHandle> find_peer(PeerId peer) const;

  void submit(const OperationPtr& operation);
  void send(PeerId peer, std::string data);
  void cancel(OperationId operation);
  void connect(OperationId id, const EngineAddress& address, Duration timeout);
  // These return once the engine thread has done it.
  void disconnect(PeerId peer);
  bool fence(PeerId peer);
  void release_counter(Imm imm);
  void deregister(const RegionPtr& region);
  EngineStats stats();
  void close();

 private:
  using Command = std::function<void()>;

  DomainGroup(EngineOptions options, Poller poller, std::unique_ptr<CompletionQueue> completions,
              std::unique_ptr<Acceptor> acceptor);
  Result<void> start();

  // Commands; false once the engine is closed.
  bool post(Command command);
  // Returns once the engine thread has run it, or has ended.
  bool run_on_engine_thread(Command command);

  // --- engine thread: the loop
  void run();
  void run_commands();
  void step();
  bool may_sleep();
  void tick(std::uint64_t now);
  void shut_down();

  // --- engine thread: connections
  void begin_connect(OperationId id, const EngineAddress& address, Duration timeout);
  void expire_connects(std::uint64_t now);
  void complete_connect(OperationId id, const Result<PeerId>& peer);
  void open_paths(Peer& peer);
  void open_lanes(Peer& peer);
  void set_socket_options(int fd) const;
  void note_fallback(const Peer& peer, const std::string& why);
  Peer& add_peer(std::unique_ptr<Stream> stream, const Session& session, std::uint64_t deadline_ns);
  Peer* find_session_peer(const SessionId& session);
  void close_peer(PeerId id, const Error& error);
  void bury_lost_peers();

  void on_accepted(std::unique_ptr<Stream> stream, const Session& session) override;
  void on_lane_hello(UniqueFd socket, const std::string& hello) override;
  void on_handshake_refused() override { ++stats_.handshakes_refused; }
  void on_dialed(Dialer& dialer, Result<Session> session) override;
  void on_lane_dialed(LaneDialer& dialer, Result<UniqueFd> socket) override;
  const Session* find_session(const SessionId& session) override;
  void on_local_link(const SessionId& session, Result<local::LocalLink> link) override;
  void on_up(Peer& peer) override;
  void on_message(Peer& peer, std::string data) override;
  void on_peer_lost(Peer& peer, Error error) override;

  // --- engine thread: operations
  void on_finished(const OperationPtr& operation, std::size_t writes, const Error& error) override;
  void on_lost(Path& path, Error error) override;
  void end_operation(const OperationPtr& operation);
  void fail_operation(const OperationPtr& operation, Errc code, std::string text);
  void expire_operations(std::uint64_t now);

  EngineOptions options_;
  EngineAddress address_;
  Identity identity_;
  std::unique_ptr<CompletionQueue> completions_;
  ImmCounters counters_;
  RegionTable regions_;
  std::atomic<OperationId> last_operation_ = 0;

  mutable std::mutex handles_mutex_;
  std::unordered_map<PeerId, std::shared_ptr<PeerHandle>> handles_;

  std::mutex commands_mutex_;
  std::vector<Command> commands_;
  bool closed_ = false;  // guarded by commands_mutex_
  std::promise<void> ending_;
  std::shared_future<void> ended_ = ending_.get_future().share();  // nothing is touched any more
  std::atomic<bool> sleeping_ = false;

  // Engine thread.
  Poller poller_;
  EngineStats stats_;
  std::uint64_t activity_ = 0;  // heartbeats do not count
  std::unique_ptr<Acceptor> acceptor_;
  std::unique_ptr<local::LocalDomain> local_;
  std::vector<std::unique_ptr<tcp::TcpDomain>> lanes_;
  std::vector<std::unique_ptr<Dialer>> dialers_;
  std::vector<std::unique_ptr<LaneDialer>> lane_dialers_;
  std::unordered_map<PeerId, std::unique_ptr<Peer>> peers_;
  std::vector<std::pair<PeerId, Error>> lost_;  // to be closed at the end of the step
  std::unordered_map<OperationId, OperationPtr> operations_;
  std::vector<std::pair<RegionPtr, std::shared_ptr<std::promise<void>>>> deregistering_;
  PeerId last_peer_ = 0;
  std::uint64_t last_tick_ns_ = 0;
  bool told_fallback_ = false;
  bool stopping_ = false;
  std::jthread thread_;  // last: joined before anything it uses is destroyed
};

}  // namespace kvxfer
