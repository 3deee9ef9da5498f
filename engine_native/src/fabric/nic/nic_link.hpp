// The NICs' side of a connected peer: opens paths between both sides' NICs over the control
// stream, replaces those that are lost, looks up the peer's memory regions, and asks the peer to
// stop writing where no NIC could be told to refuse. Engine thread only.
//
// A path that is lost is closed on both ends before anything of it is posted again: each end
// stops its NIC, then says how many immediates had come through. So the sender knows exactly how
// many of its writes still have to be counted, whatever order the NICs worked in. NICs take their
// time to make, connect and stop a path: meanwhile this goes on.
//
// A NIC that is stopped may drop what had arrived, although the sender's knows it to be delivered.
// So both ends first stop posting and say how much they know to be delivered (path_stop). An end
// stops its NIC once it has counted as much as the other knows, or after path_timeout.
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

// On the control stream, with the frames of group/peer.hpp; part of the protocol.
enum class NicFrame : std::uint8_t {
  path_open = 16,    // path, initiator's NIC, acceptor's NIC, endpoint
  path_opened = 17,  // path, status, endpoint or why not
  path_ready = 18,   // path
  path_close = 19,   // path, why, whether it failed, immediates received through it
  nic_state = 20,    // which of the sender's NICs are usable
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

// What a link asks of the peer that it is part of.
class NicLinkOwner {
 public:
  virtual void send_nic_frame(NicFrame type, std::string payload) = 0;
  virtual void lose_peer(Error error) = 0;
  // Every destination of the operation is known: it may be posted.
  virtual void queue(const OperationPtr& operation) = 0;
  // Looks a region up, off this thread; send_region() follows.
  virtual void share_region(std::uint64_t key) = 0;
  virtual void on_revoked(Imm imm) = 0;
  // usable_paths() or settled() has changed.
  virtual void on_paths_changed() = 0;
  virtual void on_notice(std::string text) = 0;
  // Whether the peer is reached over other fabrics, too.
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
    std::uint64_t timeout_ns;  // for the peer's answers
    std::uint64_t path_timeout_ns;
    unsigned paths_per_nic_pair;
    bool stops;  // the peer takes part in path_stop
  };

  NicLink(Ends ends, const std::vector<std::unique_ptr<NicDomain>>& ours, NicLinkOwner& owner,
          OperationBook& operations);

  // --- paths
  // Initiator: opens what is missing, now that NICs or time allow it.
  void open_missing(std::uint64_t now);
  // Whether no path is being opened, so that the first set-up has ended: on_paths_changed() tells.
  bool settled() const;
  const std::vector<NicPath*>& usable_paths() const { return usable_; }
  // Why there is none, as far as known.
  const std::string& trouble() const { return trouble_; }
  bool owns(const Path& path) const;
  void on_path_lost(const Path& path, Error error);
  void on_credit_due(const NicPath& path);
  void announce_nics();
  // At the end of a step, outside of any domain's poll: closes lost paths, answers revocations.
  void step(std::uint64_t now) {
    now_ = now;
    if (missing_ || greeting_ || stopping_ > 0 || !lost_.empty() || !answering_.empty()) {
      catch_up();
    }
  }
  // `stalled_ns`: for so long since the last one this thread could see nothing.
  void tick(std::uint64_t now, std::uint64_t stalled_ns);
  // All paths are closed, which is the fence, and opened anew: for a peer that does not stop
  // writing when it is asked to. Its other writes are posted again.
  void reset(std::string_view why);
  // Whether a path is being closed through which something may still land.
  bool fencing() const;
  // The fence for good. `then`, now or later: nothing lands any more; it may destroy the link.
  void shut(std::function<void()> then);

  Result<void> on_frame(NicFrame type, std::string_view payload, std::uint64_t now);

  // --- writing
  // Queues the operation once its destination is known.
  void resolve(const OperationPtr& operation);
  bool revoked_by_peer(Imm imm) const { return revoked_.contains(imm, now_); }

  // --- being written to
  void send_region(std::uint64_t key, Errc status, const RemoteRegion& region);
  void forget_region(std::uint64_t key);
  // The peer is told of the grant, also again; `keys` are those of NICs without windows.
  void open_grant(const RegionPtr& grant, RemoteRegion keys) {
    grants_.add(grant, std::move(keys), usable_);
  }
  // The peer has said that it writes there no more, or all has arrived.
  void close_grants(std::span<const RegionPtr> grants) { grants_.close(grants, usable_); }
  // See NicPath.
  bool has_windows_of(const MemoryRegion& region) const;
  void on_window(const NicPath& path, std::uint64_t key) { grants_.on_window(path, key); }
  // on_revoked() follows if `complete` is false: nothing of the peer's lands with it after that.
  void revoke(Imm imm, bool complete);
  void revoke_here(Imm imm);

 private:
  // What one end says once it is closed.
  struct Closed {
    std::unordered_map<Imm, std::uint64_t> received;  // immediates through it
    bool failed = false;
  };

  struct Entry {
    enum class State {
      making,      // our end
      opening,     // the peer's end: its answer, or on the acceptor its word that it is ready
      connecting,  // our end
      greeting,    // both are there; neither may have heard the other
      open,
      closing,  // path_stop, the fence, then the peer's word that it has closed its end
    };
    State state = State::making;
    NicPair nics{};
    std::unique_ptr<NicPath> path;  // null while it is made
    bool known = false;             // to the peer
    std::string endpoint;           // the peer's, until it is connected
    std::uint64_t since_ns = 0;     // of opening, greeting, waiting for the peer to stop and close
    std::uint64_t finished = 0;     // of its batches, when that was last looked at
    std::uint64_t progress_ns = 0;
    // --- closing
    std::string why;
    bool failed = false;
    bool stopping = false;                   // the fence waits for the peer's path_stop
    std::optional<std::uint64_t> delivered;  // to this end, as the peer has said there
    bool shut = false;
    std::optional<Closed> there;
  };
  using Entries = std::map<PathId, Entry>;

  void catch_up();
  NicMask our_usable() const;
  std::vector<NicInfo> our_infos() const;
  void open_path(NicPair pair);
  // Our end, and what follows.
  void make(PathId id, NicPair nics, std::string endpoint);
  void on_made(PathId id, Result<std::unique_ptr<NicPath>> path);
  void offer_made();
  void connect(PathId id);
  void on_connected(PathId id, const Result<void>& good);
  // Acceptor: to a path_open.
  void answer(PathId id, Errc status, std::string_view text);
  void enter_service(Entry& entry);
  void admit_proven();
  std::string silence_of(const Entry& entry, std::uint64_t now) const;
  void tell_of_silence(const Entry& entry, std::string_view why);
  bool is_stuck(Entry& entry, std::uint64_t now, std::uint64_t stalled_ns) const;
  // These may erase the entry.
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
  std::uint64_t now_ = 0;  // when it was last called
  std::uint64_t last_open_ns_ = 0;
  std::uint64_t retry_at_ns_ = 0;
  bool missing_ = false;   // paths, perhaps
  bool greeting_ = false;  // some paths, perhaps
  unsigned stopping_ = 0;
  // Pairs whose last paths carried nothing, as where the network between them swallows everything.
  struct Fruitless {
    unsigned times = 0;
    std::uint64_t until_ns = 0;  // not opened again before, where there is another way
  };
  std::map<NicPair, Fruitless> fruitless_;
  std::string trouble_;

  RemoteRegions regions_;
  LostWrites lost_writes_;
  NicGrants grants_;
  RevokedCounters revoked_;
  std::vector<Imm> answering_;  // the peer waits until nothing of these is under way
  bool shutting_ = false;       // for good
  std::function<void()> then_;
  // For what may come when this is gone.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace kvxfer
