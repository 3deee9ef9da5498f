// The NICs that serve one GPU (or one host), and the thread that drives them.
//
// All state below "engine thread" is touched by that thread alone; other threads hand it commands.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "background.hpp"
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
#include "spare_writes.hpp"

namespace kvxfer {

class DomainGroup final : private AcceptorEvents,
                          private DialerEvents,
                          private local::LocalEvents,
                          private NicEvents,
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
  SpareWrites& spare_writes() { return spare_writes_; }
  OperationId next_operation_id() { return ++last_operation_; }
  // What the engine's NICs are, by their numbers.
  const std::vector<NicInfo>& nics() const { return identity_.introduction.nics; }
  // The fabrics in use, in the order in which they are preferred.
  const std::vector<std::string>& fabrics() const { return fabrics_; }
  // Registers memory with every NIC that can reach it, then lets peers write into it.
  Result<void> register_region(const RegionPtr& region);
  std::shared_ptr<PeerHandle> find_peer(PeerId peer) const;

  void submit(const SubmissionPtr& submission);
  // Looks at watched words now.
  void wake();
  void send(PeerId peer, std::string data);
  void cancel(OperationId operation);
  void connect(OperationId id, const EngineAddress& address, Duration timeout);
  // Without an engine thread: one step of it on the caller's.
  bool poll();
  // These return once the engine thread has done it.
  void disconnect(PeerId peer);
  bool fence(PeerId peer);
  Result<std::vector<MrDescriptor>> grant(Imm imm, std::span<const RegionRange> ranges);
  // False where peers have to be asked first, because no NIC could be told to refuse: then
  // Completion::Kind::released follows, unless `wait`.
  bool release_counter(Imm imm, bool wait);
  // Fails where a NIC keeps the memory within its reach; it may be tried again.
  Result<void> deregister(const RegionPtr& region);
  EngineStats stats();
  void close();

 private:
  using Command = std::function<void()>;

  // A released counter that these peers have been asked to write to no more.
  struct Revocation {
    Imm imm;
    std::vector<PeerId> asked;
    std::vector<RegionPtr> grants;  // made with its counter
    std::uint64_t deadline_ns;      // then their paths are reset
    bool reset = false;
    std::shared_ptr<std::promise<void>> done;  // null: a completion tells
  };

  // A peer that is lost, until nothing of it lands any more.
  struct Closing {
    std::unique_ptr<Peer> peer;
    Error why;
    std::vector<std::shared_ptr<std::promise<void>>> waiting;
  };

  DomainGroup(EngineOptions options, Poller poller, std::unique_ptr<CompletionQueue> completions,
              std::unique_ptr<Acceptor> acceptor);
  Result<void> start();
  Result<void> open_nics(ReceiveContext receive_context);

  // Commands; false once the engine is closed.
  bool post(Command command);
  // Returns once the engine thread has run it, or has ended.
  bool run_on_engine_thread(const Command& command);
  // For what the engine thread does.
  void await(const std::future<void>& done);

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
  void open_remote_paths(Peer& peer, const std::string& local_trouble = {});
  void set_socket_options(int fd) const;
  void note_fallback(const Peer& peer, const std::string& why);
  Peer& add_peer(std::unique_ptr<Stream> stream, const Session& session);
  Peer* find_session_peer(const SessionId& session);
  void limit_opening();
  // First the fence; then whoever waits may take memory back.
  void close_peer(PeerId id, const Error& error);
  void finish_closing(PeerId id);
  // False if it is not there any more.
  bool close_and_wait(PeerId peer, const Error& why, bool say_goodbye);
  void bury_lost_peers();

  void on_accepted(std::unique_ptr<Stream> stream, const Session& session) override;
  void on_lane_hello(UniqueFd socket, const std::string& hello) override;
  void on_handshake_refused(Errc why) override { stats_.handshakes_refused.count(why); }
  void on_dialed(Dialer& dialer, Result<Session> session) override;
  void on_lane_dialed(LaneDialer& dialer, Result<UniqueFd> socket) override;
  const Session* find_session(const SessionId& session) override;
  void on_local_link(const SessionId& session, Result<local::LocalLink> link) override;
  void on_stranger_refused(Errc why) override { stats_.handshakes_refused.count(why); }
  void on_up(Peer& peer) override;
  void on_message(Peer& peer, std::string data) override;
  void on_posted(std::size_t writes) override { stats_.writes_posted += writes; }
  void on_peer_lost(Peer& peer, Error error) override;

  // --- engine thread: NICs
  void on_lost(Path& path, Error error) override;
  void on_nic_state(NicDomain& domain) override;
  void on_credit_due(NicPath& path) override;
  void on_window(NicPath& path, std::uint64_t grant) override;
  void share_region(Peer& peer, std::uint64_t key) override;
  void share_region(Peer& peer, const RegionPtr& region);

  // --- engine thread: grants
  void track_grants(Imm imm, const std::vector<RegionPtr>& grants);
  void close_grants(const std::vector<RegionPtr>& grants);
  void close_grants_of(const RegionPtr& region);
  std::vector<PeerId> revoke(Imm imm);
  void on_revoked(Peer& peer, Imm imm) override;
  void forget_revocations(PeerId peer);
  void end_revocations();
  void reset_late_writers(std::uint64_t now);

  // --- engine thread: operations
  void begin(const SubmissionPtr& submission);
  // Those under way that fit.
  template <typename Fits>
  std::vector<OperationPtr> operations_that(Fits fits) const;
  void post_operation(const OperationPtr& operation);
  void release_held();
  void on_finished(const OperationPtr& operation, const WriteRange& writes,
                   const Error& error) override;
  void fail(const OperationPtr& operation, Errc code, std::string text) override;
  void settle(const OperationPtr& operation) override;
  std::vector<OperationPtr> operations_with(const Peer& peer, Imm imm) override;
  void end_operation(const OperationPtr& operation);
  void complete(const Submission& submission);
  void expire_operations(std::uint64_t now);
  void end_deregistrations();

  EngineOptions options_;
  EngineAddress address_;
  Identity identity_;
  std::vector<std::string> fabrics_;
  std::unique_ptr<CompletionQueue> completions_;
  ImmCounters counters_;
  RegionTable regions_;
  SpareWrites spare_writes_;
  std::atomic<OperationId> last_operation_ = 0;

  mutable std::mutex handles_mutex_;
  std::unordered_map<PeerId, std::shared_ptr<PeerHandle>> handles_;

  std::mutex commands_mutex_;
  std::vector<Command> commands_;
  std::atomic<bool> commanded_ = false;  // whether there are any
  bool closed_ = false;                  // guarded by commands_mutex_
  std::promise<void> ending_;
  std::shared_future<void> ended_ = ending_.get_future().share();  // nothing is touched any more
  std::atomic<bool> sleeping_ = false;

  // Engine thread.
  Poller poller_;
  EngineStats stats_;
  std::uint64_t activity_ = 0;  // heartbeats do not count
  std::uint64_t activity_before_ = 0;
  unsigned steps_ = 0;  // since the poller was looked at
  std::unique_ptr<Acceptor> acceptor_;
  std::unique_ptr<local::LocalDomain> local_;
  std::vector<std::unique_ptr<tcp::TcpDomain>> lanes_;
  std::vector<std::unique_ptr<NicDomain>> nics_;  // fixed once started
  std::vector<std::unique_ptr<Dialer>> dialers_;
  std::vector<std::unique_ptr<LaneDialer>> lane_dialers_;
  std::unordered_map<PeerId, std::unique_ptr<Peer>> peers_;
  std::unordered_map<PeerId, Closing> closing_;
  std::vector<std::pair<PeerId, Error>> lost_;  // to be closed at the end of the step
  std::unordered_map<OperationId, SubmissionPtr> submissions_;
  std::vector<std::pair<RegionPtr, std::shared_ptr<std::promise<void>>>> deregistering_;
  std::vector<OperationPtr> held_;                          // for a watched word
  std::unordered_map<Imm, std::vector<RegionPtr>> grants_;  // of live counters
  std::vector<Revocation> revocations_;
  PeerId last_peer_ = 0;
  std::uint64_t last_tick_ns_ = 0;
  bool told_fallback_ = false;
  bool stopping_ = false;
  bool driven_ = false;  // by its caller, until it is closed
  Background background_;
  std::jthread thread_;  // last: joined before anything it uses is destroyed
};

template <typename Fits>
std::vector<OperationPtr> DomainGroup::operations_that(Fits fits) const {
  std::vector<OperationPtr> found;
  for (const auto& [id, submission] : submissions_) {
    for (Operation& part : submission->parts) {
      if (!part.ended && fits(part)) found.emplace_back(submission, part);
    }
  }
  return found;
}

}  // namespace kvxfer
