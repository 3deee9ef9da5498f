// One queue pair of a NIC, to one NIC of a peer. Engine thread only.
#pragma once

#include <memory>
#include <string>

#include "fabric/nic/nic_domain.hpp"
#include "fabric/verbs/async_events.hpp"
#include "fabric/verbs/nic_queues.hpp"
#include "fabric/verbs/path_windows.hpp"
#include "fabric/verbs/queue_pair.hpp"
#include "thread_owner.hpp"

namespace kvxfer::verbs {

// The state that the paths of one NIC share; it outlives them.
struct VerbsNic {
  std::shared_ptr<const VerbsDevice> device;
  NicContext context;
  // More are made when these are full of paths.
  std::vector<std::unique_ptr<NicQueues>> queues;
  std::vector<NicQueues::Taken> want_queues;  // callers that wait for new queues
  std::unique_ptr<AsyncEvents> events;
  Port port;  // current state
  NicLoad load;
  bool broken = false;              // permanently
  std::vector<VerbsPath*> waiting;  // paths whose step() is to be called
  bool usable() const { return port.active && !broken; }
  Error down() const { return {Errc::nic_lost, "NIC " + device->name() + " is down"}; }
};

class VerbsPath final : public NicPath {
 public:
  static void open(NicPathIdentity identity, VerbsNic& nic, NicDomain::Opened then);
  ~VerbsPath() override;

  std::string_view fabric() const override { return "verbs"; }
  std::string endpoint() const override { return ours_.encode(); }
  void connect(std::string_view endpoint, Connected then) override;
  bool has_room(const Operation& operation, bool counted) const override {
    return sends_left_ >= kMaxGroupWrites && NicPath::has_room(operation, counted);
  }
  std::size_t post(const OperationPtr& operation, const WriteRange& writes) override;
  void shut(std::function<void()> then) override;
  bool open_window(const MemoryRegion& grant) override;
  void close_window(std::uint64_t grant) override {
    windows_.close(grant);
    post_windows();
  }
  bool has_windows_of(const MemoryRegion& region) const override;
  std::optional<RemoteKey> window(std::uint64_t grant) const override {
    return windows_.find(grant);
  }

  // --- calls of the NIC's queues and events
  void on_sent(std::uint64_t request);
  void on_immediates(Imm imm, std::uint64_t count) { count_immediates(imm, count); }
  void on_failed(const ibv_wc& completion);
  void on_failed(const std::string& cause);
  void on_nic_down(const std::string& why) { lose({Errc::nic_lost, why}); }
  // Ends the wait of a path in VerbsNic::waiting, once it is over.
  void step(std::uint64_t now);
  bool is_stopping() const { return state_ == State::stopping; }

 private:
  // State of the queue pair. Each change of state takes the NIC some time.
  enum class State { made, joining, starting, connected, stopping, gone };

  VerbsPath(NicPathIdentity identity, NicQueues::Share share, const Port& port,
            std::shared_ptr<QueuePair> pair, VerbsNic& nic);
  void write_request(std::size_t at, const Operation& operation, const WireWrite& write,
                     const RemoteKey& key, bool counted);
  void on_joined(int error, const PathEndpoint& theirs);
  void on_started(int error, const PathEndpoint& theirs);
  void no_way(const std::string& why);
  void make_windows();
  void post_windows();
  // True from shut() on, also after the queue pair has stopped: the peer may not have closed its
  // end.
  bool stopping() const { return then_shut_ != nullptr || state_ == State::gone; }
  void stop();
  void destroy();
  void finish();
  // Waits in this state, as one of VerbsNic::waiting, for `ns` nanoseconds at most.
  void wait(State state, std::uint64_t ns);
  void leave(State next);

  [[no_unique_address]] ThreadOwner thread_;
  VerbsNic& nic_;
  NicQueues& queues_;
  PathShare share_;
  std::shared_ptr<QueuePair> pair_;  // null once shut
  Port port_;                        // sent to the peer
  PathEndpoint ours_;
  PathWindows windows_;
  std::uint32_t sends_left_;
  State state_ = State::made;
  bool stopped_ = false;           // every request that was posted has completed
  std::uint64_t deadline_ns_ = 0;  // end of the wait
  ibv_gid their_gid_{};
  Connected then_connected_;
  std::function<void()> then_shut_;  // shut() was called
  bool making_windows_ = false;
  // Expires with the path, for calls that come later.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace kvxfer::verbs
