// The NICs' side of a connected peer. It opens paths between both sides' NICs over the control
// stream, replaces lost paths, looks up the peer's memory regions, and asks the peer to stop
// writing if no NIC can be told to refuse. Engine thread only.
//
// A lost path is closed on both ends before its writes are posted again: each end stops its NIC,
// then reports how many immediates came through. So the sender knows exactly how many of its writes
// still have to be counted, in whatever order the NICs worked. NICs take time to make, connect and
// stop a path; the link does not wait for them.
//
// A stopped NIC may drop writes that had arrived, although the sender's NIC reported them
// delivered. So both ends first stop posting and report how many immediates they know to be
// delivered (path_stop). An end stops its NIC once it has counted as many as the other knows, or
// after path_timeout.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "bootstrap/bytes.hpp"
#include "fabric/nic/lost_writes.hpp"
#include "fabric/nic/nic_domain.hpp"
#include "fabric/nic/nic_grants.hpp"
#include "fabric/nic/nic_pairing.hpp"
#include "fabric/nic/remote_regions.hpp"
#include "fabric/nic/revoked_counters.hpp"
#include "operation.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

// Frames on the control stream, next to those of group/peer.hpp; part of the protocol.
enum class NicFrame : std::uint8_t {
  path_open = 16,    // path, initiator's NIC, acceptor's NIC, endpoint
  path_opened = 17,  // path, status, endpoint or reason
  path_ready = 18,   // path
  path_close = 19,   // path, why, whether it failed, immediates received through it
  nic_state = 20,    // the sender's usable NICs
  resolve = 21,      // region key
  region = 22,       // region key, status, length, immediate, windowed, windows, NIC keys
  region_gone = 23,  // region key
  revoke = 24,       // immediate, whether all its writes have arrived
  revoked = 25,      // immediate
  credit = 26,       // path, immediates consumed
  window = 27,       // region key, path, address, rkey
  path_stop = 28,    // path, why, whether it failed, immediates known to be delivered through it
};
inline bool is_nic_frame(std::uint8_t type) { return type >= 16 && type <= 28; }

// The peer that a link is part of, as the link uses it.
class NicLinkOwner {
 public:
  virtual void send_nic_frame(NicFrame type, std::string payload) = 0;
  virtual void lose_peer(Error error) = 0;
  // Queues the operation to be posted: its destination is known.
  virtual void queue(const OperationPtr& operation) = 0;
  // Looks up a region, off this thread; send_region() follows.
  virtual void share_region(std::uint64_t key) = 0;
  virtual void on_revoked(Imm imm) = 0;
  // Called when usable_paths() or settled() has changed.
  virtual void on_paths_changed() = 0;
  virtual void on_notice(std::string text) = 0;
  // True if the peer is also reached over other fabrics.
  virtual bool has_other_ways() const = 0;

 protected:
  ~NicLinkOwner() = default;
};

class NicLink {
 public:
  struct Ends {
    PeerId peer;
    std::string label;  // the peer, for error texts
    std::vector<NicInfo> theirs;
    bool initiator;
    std::uint64_t timeout_ns;  // limit for the peer's answers
    std::uint64_t path_timeout_ns;
    unsigned paths_per_nic_pair;
    bool stops;  // the peer takes part in path_stop
  };

  NicLink(Ends ends, const std::vector<std::unique_ptr<NicDomain>>& ours, NicLinkOwner& owner,
          OperationBook& operations);

  // --- paths
  // Initiator: opens missing paths, once the NICs and the pause after a failure allow it.
  void open_missing(std::uint64_t now);
  // True if no path is being opened, so that the first set-up has ended; see on_paths_changed().
  bool settled() const;
  const std::vector<NicPath*>& usable_paths() const { return usable_; }
  // Returns why there are no usable paths, as far as known.
  const std::string& trouble() const { return trouble_; }
  bool owns(const Path& path) const;
  void on_path_lost(const Path& path, Error error);
  void on_credit_due(const NicPath& path);
  void announce_nics();
  // Closes lost paths and answers revocations. Called at the end of a step, outside of any domain's
  // poll.
  void step(std::uint64_t now) {
    now_ = now;
    if (missing_ || greeting_ || stopping_ > 0 || !lost_.empty() || !answering_.empty()) {
      catch_up();
    }
  }
  // Called at every heartbeat. `stalled_ns`: the time since the last one in which this thread stood
  // still.
  void tick(std::uint64_t now, std::uint64_t stalled_ns);
  // Closes all paths, which is the fence, and opens them anew. Used if the peer does not stop
  // writing when asked; its other writes are posted again.
  void reset(std::string_view why);
  // True if a path is being closed through which writes may still land.
  bool fencing() const;
  // Closes all paths for good. Calls `then`, now or later, when nothing lands any more; it may
  // destroy the link.
  void shut(std::function<void()> then);

  Result<void> on_frame(NicFrame type, std::string_view payload, std::uint64_t now);

  // --- writing
  // Queues the operation once its destination is known.
  void resolve(const OperationPtr& operation);
  bool revoked_by_peer(Imm imm) const { return revoked_.contains(imm, now_); }

  // --- being written to
  void send_region(std::uint64_t key, Errc status, const RemoteRegion& region);
  void forget_region(std::uint64_t key);
  // Sends the grant to the peer, the first time or again; `keys` are those of NICs without windows.
  void open_grant(const RegionPtr& grant, RemoteRegion keys) {
    grants_.add(grant, std::move(keys), usable_);
  }
  // Closes grants, once the peer has said that it no longer writes to them, or all its writes have
  // arrived.
  void close_grants(std::span<const RegionPtr> grants) { grants_.close(grants, usable_); }
  // See NicPath.
  bool has_windows_of(const MemoryRegion& region) const;
  void on_window(const NicPath& path, std::uint64_t key) { grants_.on_window(path, key); }
  // Asks the peer to stop writing with the immediate. If `complete` is false, on_revoked() follows,
  // after which none of its writes lands.
  void revoke(Imm imm, bool complete);
  void revoke_here(Imm imm);

 private:
  // The report of an end that is closed.
  struct Closed {
    std::unordered_map<Imm, std::uint64_t> received;  // immediates that came through the path
    bool failed = false;
  };

  struct Entry {
    enum class State {
      making,      // our end is being made
      opening,     // waits for the peer's answer, or on the acceptor for path_ready
      connecting,  // our end is being connected
      greeting,    // both ends are connected, but may not have heard each other
      open,
      closing,  // path_stop, the fence, then the peer's path_close
    };
    State state = State::making;
    NicPair nics{};
    std::unique_ptr<NicPath> path;  // null while it is being made
    bool known = false;             // the peer knows of the path
    std::string endpoint;           // the peer's, until it is connected
    std::uint64_t since_ns = 0;     // start of this state, or of a wait for the peer
    std::uint64_t finished = 0;     // finished batches at the last look
    std::uint64_t progress_ns = 0;
    // --- closing
    std::string why;
    bool failed = false;
    bool stopping = false;                   // the fence waits for the peer's path_stop
    std::optional<std::uint64_t> delivered;  // immediates delivered here, by the peer's path_stop
    bool shut = false;
    std::optional<Closed> there;
  };
  using Entries = std::map<PathId, Entry>;

  void catch_up();
  NicMask our_usable() const;
  std::vector<NicInfo> our_infos() const;
  void open_path(NicPair pair);
  // Makes our end, then offers or connects it.
  void make(PathId id, NicPair nics, std::string endpoint);
  void on_made(PathId id, Result<std::unique_ptr<NicPath>> path);
  void offer_made();
  void connect(PathId id);
  void on_connected(PathId id, const Result<void>& good);
  // Acceptor: answers a path_open.
  void answer(PathId id, Errc status, std::string_view text);
  void enter_service(Entry& entry);
  void admit_proven();
  std::string silence_of(const Entry& entry, std::uint64_t now) const;
  void tell_of_silence(const Entry& entry, std::string_view why);
  bool is_stuck(Entry& entry, std::uint64_t now, std::uint64_t stalled_ns) const;
  // Functions that close a path, and may erase its entry.
  void close(Entry& entry, std::string_view why, bool failed);
  void follow(Entry& entry, const std::string& why, bool failed);
  void stop(Entry& entry);
  void end_stops();
  void end_stop(PathId id);
  void begin_shut(Entry& entry);
  void on_shut(PathId id);
  void say_closed(PathId id, std::string_view why, const Closed& here);
  void finish_closing(PathId id);
  void end_if_shut();
  void settle(NicPath& path, const Closed& there);
  void refresh_usable();
  void note_use(NicPair nics, const NicPath& closed);
  void retry(std::string_view trouble);
  void retry_now();

  Result<void> on_path_open(ByteReader reader);
  Result<void> on_path_opened(ByteReader reader);
  Result<void> on_path_stop(ByteReader reader);
  Result<void> on_path_close(ByteReader reader);
  void on_revoke(Imm imm, bool complete);
  void answer_revokes();

  [[no_unique_address]] ThreadOwner thread_;
  Ends ends_;
  const std::vector<std::unique_ptr<NicDomain>>& ours_;
  NicLinkOwner& owner_;
  OperationBook& operations_;
  NicMask their_usable_;
  Entries entries_;
  std::vector<NicPath*> usable_;
  std::vector<std::pair<PathId, Error>> lost_;
  PathId last_path_ = 0;
  std::uint64_t now_ = 0;  // time of the last call
  std::uint64_t last_open_ns_ = 0;
  std::uint64_t retry_at_ns_ = 0;
  bool missing_ = false;   // paths may be missing
  bool greeting_ = false;  // paths may be greeting
  unsigned stopping_ = 0;
  // A pair whose last paths carried nothing, e.g. because the network between them drops
  // everything.
  struct Fruitless {
    unsigned times = 0;
    std::uint64_t until_ns = 0;  // not opened again before, if there is another way
  };
  std::map<NicPair, Fruitless> fruitless_;
  std::string trouble_;

  RemoteRegions regions_;
  LostWrites lost_writes_;
  NicGrants grants_;
  RevokedCounters revoked_;
  std::vector<Imm> answering_;  // the peer waits until no write with these is under way
  bool shutting_ = false;       // shut() was called
  std::function<void()> then_;
  // Expires with the link, for calls that come later.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace kvxfer
