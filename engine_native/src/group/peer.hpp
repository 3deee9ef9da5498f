// One connected peer engine: its control stream, its paths, and the operations queued for it.
// Engine thread only, except PeerHandle.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/connect_waiters.hpp"
#include "bootstrap/handshake.hpp"
#include "bootstrap/stream.hpp"
#include "domain.hpp"
#include "fabric/nic/nic_link.hpp"
#include "kvxfer/types.hpp"
#include "operation.hpp"
#include "patience.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class Peer;

// The data of a peer that caller threads need before they queue something for it.
struct PeerHandle {
  PeerId id = 0;
  EngineId engine;
  std::string label;                 // used in error texts
  std::atomic<unsigned> shards = 1;  // NICs that share a large write
  std::atomic<bool> groups = false;  // one immediate counts for several writes
  std::atomic<std::uint64_t> queued_writes = 0;
  std::atomic<std::uint64_t> queued_message_bytes = 0;
  Peer* up = nullptr;  // engine thread: null unless it is up
};

struct PeerGroup {
  std::vector<std::shared_ptr<PeerHandle>> peers;
};

// Returns a message's charge against the bound; empty ones are not free.
constexpr std::uint64_t message_charge(std::size_t bytes) { return bytes + 64; }

// Frames on the control stream, next to NicFrame; part of the protocol.
enum class ControlFrame : std::uint8_t {
  heartbeat = 1,
  message = 2,
  paths = 3,  // the initiator has opened this many sockets, and all NIC paths
  ready = 4,  // the acceptor sees them
  goodbye = 5,
};

class PeerEvents {
 public:
  virtual void on_up(Peer& peer) = 0;
  virtual void on_message(Peer& peer, std::string data) = 0;
  virtual void on_posted(std::size_t writes) = 0;
  // Called when the peer must be closed: at most once, never from within close_paths().
  virtual void on_peer_lost(Peer& peer, Error error) = 0;

  // Requests of the peer's NIC link: see NicLinkOwner.
  virtual void share_region(Peer& peer, std::uint64_t key) = 0;
  virtual void on_revoked(Peer& peer, Imm imm) = 0;
  virtual void on_notice(Peer& peer, std::string text) = 0;

 protected:
  ~PeerEvents() = default;
};

class Peer final : public StreamOwner, private NicLinkOwner {
 public:
  enum class State { opening, announced, up, lost };

  Peer(PeerId id, std::unique_ptr<Stream> stream, Session session, PeerEvents& events,
       OperationBook& operations);
  ~Peer() { handle_->up = nullptr; }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  PeerId id() const { return handle_->id; }
  State state() const { return state_; }
  bool up() const { return state_ == State::up; }
  bool was_up() const { return was_up_; }
  const Session& session() const { return session_; }
  const std::string& label() const { return handle_->label; }
  const std::shared_ptr<PeerHandle>& handle() const { return handle_; }
  PathPeer end_of_path() const {
    return {id(), label(), session_.version >= kGroupsVersion,
            session_.version >= kPathStopVersion};
  }
  // Returns the fabric that most writes take.
  std::string fabric() const;

  // --- set-up. The initiator opens paths, then announces them; the acceptor confirms.
  void use_nics(const std::vector<std::unique_ptr<NicDomain>>& ours, bool initiator,
                const EngineOptions& options);
  void add_path(std::unique_ptr<Path> path, std::uint32_t lane);
  bool has_lane(std::uint32_t lane) const;
  // The paths with their own socket; the others are the link's.
  const std::vector<std::unique_ptr<Path>>& paths() const { return paths_; }
  NicLink* nics() const { return nics_.get(); }
  // Announces the paths once everything that was begun has ended and there is a path. While a
  // connect waits for it, the NICs try again.
  void announce_paths();
  // Returns why it is not up yet, as far as known.
  std::string trouble() const;
  ConnectWaiters waiters;      // connect operations that this peer's set-up answers
  unsigned lanes_to_open = 0;  // initiator: dials that have not ended
  EngineAddress address;       // initiator: the address to dial lanes
  bool initiator() const { return address.port != 0; }

  // --- running
  // Fails, with the reason, if no path can carry the operation once its destination is known.
  Result<void> reaches(const Operation& operation) const;
  // Posts it in its turn, once its destination is known.
  void submit(const OperationPtr& operation);
  bool has_backlog() const { return !backlog_.empty(); }
  // Posts as much as the paths take.
  void pump();
  void send_message(std::string_view data);
  // Sends a heartbeat and checks the peer's. `stalled_ns`: the time in which this engine itself did
  // not run, which must not count against the peer.
  void tick(std::uint64_t now, std::uint64_t stalled_ns, Duration timeout);
  // True if it misses heartbeats: then tick() decides on it.
  bool late(std::uint64_t now) const {
    return patience_.silence(now) > 3 * session_.introduction.heartbeat_ns;
  }

  // Fences the peer, and stops reading from it. Calls `then`, now or later, once none of its writes
  // lands here any more; `then` may destroy this object.
  void close_paths(std::function<void()> then);
  // Tells the peer why this end gives up, if it still listens.
  void say_goodbye(const Error& why);
  void lose(Error error);

 private:
  void on_input(std::string& in) override;
  void on_sent() override;
  void on_stream_lost(Error error) override;
  void handle_frame(ControlFrame type, std::string payload);
  void send_frame(ControlFrame type, std::string_view payload, std::uint64_t charge = 0);
  void confirm_paths();
  void come_up();
  void set_lost();
  void list_choices();
  // Posts as much of it as paths take. `all`: it is posted, or has failed. `alone`: it waits, and
  // others need not. `waits`: others wait, too.
  enum class Posted { all, alone, waits };
  Posted post(const OperationPtr& operation);
  Path* path_for(const Operation& operation, bool counted);
  std::size_t share_of(const Path& path, const Operation& operation,
                       const WriteRange& writes) const;

  // NicLinkOwner
  void send_nic_frame(NicFrame type, std::string payload) override;
  void lose_peer(Error error) override { lose(std::move(error)); }
  void queue(const OperationPtr& operation) override;
  void share_region(std::uint64_t key) override { events_.share_region(*this, key); }
  void on_revoked(Imm imm) override { events_.on_revoked(*this, imm); }
  void on_paths_changed() override;
  void on_notice(std::string text) override { events_.on_notice(*this, std::move(text)); }
  bool has_other_ways() const override { return !paths_.empty(); }

  [[no_unique_address]] ThreadOwner thread_;
  std::shared_ptr<PeerHandle> handle_;
  std::unique_ptr<Stream> stream_;
  Session session_;
  PeerEvents& events_;
  OperationBook& operations_;
  State state_ = State::opening;
  bool was_up_ = false;  // on_up() was reported
  Patience patience_;
  std::uint64_t last_input_ns_ = 0;  // passed to patience_ in tick(), after own stalls
  std::uint64_t last_path_ns_;       // the last time there was a path
  std::vector<std::unique_ptr<Path>> paths_;
  std::vector<std::uint32_t> lanes_;  // lanes of paths_, in the same order
  std::unique_ptr<NicLink> nics_;
  std::vector<Path*> choices_;              // open paths of paths_ and nics_
  std::size_t next_path_ = 0;               // round robin
  std::optional<std::uint32_t> announced_;  // acceptor: sockets that the initiator has opened
  std::deque<std::uint64_t> charges_;       // charges of frames that are not sent yet
  std::deque<OperationPtr> backlog_;
};

// The lane number of the local path.
inline constexpr std::uint32_t kLocalPathLane = 0xffffffff;
inline constexpr std::uint32_t kMaxPaths = kMaxLanes + 1;

}  // namespace kvxfer
