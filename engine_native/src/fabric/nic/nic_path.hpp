// The state of every path of a NIC: batches under way, the window, credits for immediates, and what
// has to be known when the path is lost. A fabric adds the posting and the completions.
//
// An immediate consumes a receive of the peer's, so a sender may have no more of them under way
// than the peer has reserved for the path; the peer reports how many it has consumed (credit).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "domain.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class NicEvents;

struct NicPathIdentity {
  PathId id = 0;
  PeerId peer = 0;
  std::uint32_t nic = 0;         // ours
  std::uint32_t remote_nic = 0;  // the peer's
  std::string label;             // the peer, for error texts
};

// The bytes that all paths of one NIC have posted and not seen delivered.
struct NicLoad {
  std::uint64_t bits_per_second = 1;
  std::uint64_t bytes = 0;
  std::uint64_t ns() const {
    return static_cast<std::uint64_t>(static_cast<double>(bytes) * 8e9 /
                                      static_cast<double>(bits_per_second));
  }
};

class NicPath : public Path {
 public:
  struct Batch {
    std::uint64_t sequence;  // 1, 2, …
    OperationPtr operation;
    WriteRange writes;
    std::uint64_t bytes;
    std::uint64_t immediates;
  };
  struct Unfinished {
    OperationPtr operation;
    WriteRange writes;
  };

  const NicPathIdentity& identity() const { return identity_; }

  // --- set-up
  // Returns the data that the peer's end needs to connect to this one.
  virtual std::string endpoint() const = 0;
  // Connects to the peer's end. Calls `then` now or later, but not once shut() is called.
  using Connected = std::function<void(Result<void>)>;
  virtual void connect(std::string_view endpoint, Connected then) = 0;
  // Lets writes be posted.
  void open() { open_ = true; }
  bool is_open() const { return open_; }
  // True if each end has heard the other. If that takes a while, the path is not opened before.
  virtual bool proven() const { return true; }
  // Returns a likely reason why the ends do not hear each other.
  virtual std::string_view likely_cause() const { return {}; }

  // --- end
  // Ends posting. Writes that are delivered later count as unfinished: the peer is told
  // imms_delivered(), which is final.
  void seal() { sealed_ = true; }
  bool sealed() const { return sealed_; }
  std::uint64_t imms_delivered() const { return imms_delivered_; }
  // Stops the path; called once, before it is destroyed. Nothing is posted from now on. Calls
  // `then`, now or later, when nothing lands any more, and received() and unfinished writes are
  // final; `then` may destroy the path.
  virtual void shut(std::function<void()> then) = 0;
  // Returns how many immediates came through this path, for each counter that is still live.
  const std::unordered_map<Imm, std::uint64_t>& received() const { return received_; }
  // Returns how many immediates of ours are known to be delivered, for each that the peer did not
  // revoke.
  std::uint64_t delivered(Imm imm) const;
  const std::unordered_map<Imm, std::uint64_t>& delivered() const { return delivered_; }
  void forget(Imm revoked_by_peer) { delivered_.erase(revoked_by_peer); }
  std::vector<Unfinished> take_unfinished();

  // --- progress
  std::size_t batches() const { return batches_.size(); }  // batches under way
  std::uint64_t finished_batches() const { return finished_batches_; }
  // Returns how many writes under way are posted again without this immediate, which had arrived
  // before.
  std::size_t uncounted(Imm imm) const;

  // --- grants, by their region keys, up to NicDomain::max_window()
  // Opens a window; NicEvents::on_window() follows, unless the path is lost. Returns false if the
  // NIC has none left.
  virtual bool open_window(const MemoryRegion&) { return false; }
  // Closes a window soon. The peer has said that it no longer writes there; if not, use shut().
  virtual void close_window(std::uint64_t) {}
  // True if a window is open, or not closed yet: the region cannot be unregistered before.
  virtual bool has_windows_of(const MemoryRegion&) const { return false; }
  // Returns the key of a window that is open.
  virtual std::optional<RemoteKey> window(std::uint64_t) const { return std::nullopt; }

  // --- credit
  std::uint64_t consumed() const { return consumed_; }
  void add_credit(std::uint64_t consumed_by_peer);

  // Ends the refusal of an immediate: the peer was told that it does not count here, and has
  // answered.
  void end_refusal(Imm imm) {
    if (refused_ == imm) refused_ = 0;
  }

  // --- Path
  PathRank rank() const final { return PathRank::nic; }
  bool reaches(const Operation& operation) const final;
  bool has_room(const Operation& operation, bool counted) const override;
  std::uint64_t load_ns() const override { return load_.ns(); }
  std::uint64_t bits_per_second() const override { return load_.bits_per_second; }
  void revoke_counter(Imm imm) final { received_.erase(imm); }
  void revoke_region(std::uint64_t) final {}

 protected:
  // `imm_window`: receives reserved here for the peer's immediates.
  NicPath(NicPathIdentity identity, std::uint64_t imm_window, NicLoad& load,
          ReceiveContext receive_context, NicEvents& events);

  // Returns the permission to write, for an operation that this path reaches.
  const RemoteKey& remote_key(const Operation& operation) const {
    return *operation.destination->key(identity_.id, identity_.remote_nic);
  }
  // Sets the number of receives that the peer has reserved for us, as its endpoint() says.
  void set_peer_imm_window(std::uint64_t writes) { peer_imm_window_ = writes; }
  // Returns how many of `writes` may go out as one batch, at most `limit` (kMaxGroupWrites or
  // more).
  std::size_t batch_limit(const OperationPtr& operation, const WriteRange& writes,
                          std::size_t limit) const;
  // Records a posted batch, which is later finished by its sequence.
  const Batch& add_batch(const OperationPtr& operation, const WriteRange& writes,
                         std::uint64_t bytes);
  // Finishes every batch up to this sequence, on a path that keeps the order of its writes.
  void finish_through(std::uint64_t sequence);
  // Finishes this batch, on an unordered path, whose batches have one write each.
  void finish(std::uint64_t sequence);
  // Counts immediates from the peer, once kernels of GPUs see the bytes written before them.
  void count_immediates(Imm imm, std::uint64_t count);
  // Ends shut(), once all immediates that came are counted.
  void end(std::function<void()> then);
  void lose(Error error);
  bool lost() const { return lost_; }

  NicPathIdentity identity_;
  ReceiveContext receive_context_;
  NicEvents& events_;

 private:
  void report(Batch& batch);
  void count_seen(Imm imm, std::uint64_t count);

  [[no_unique_address]] ThreadOwner thread_;
  std::uint64_t imm_window_;
  NicLoad& load_;
  bool open_ = false;
  bool lost_ = false;
  std::deque<Batch> batches_;  // ordered by sequence; finished ones keep their place, empty
  std::uint64_t last_sequence_ = 0;
  std::uint64_t finished_batches_ = 0;
  std::uint64_t outstanding_bytes_ = 0;
  std::uint64_t peer_imm_window_ = 0;
  std::uint64_t imms_sent_ = 0;
  std::uint64_t imms_consumed_ = 0;  // part of imms_sent_ that the peer has consumed
  std::uint64_t imms_delivered_ = 0;
  bool sealed_ = false;
  std::uint64_t consumed_ = 0;  // immediates of the peer's that we have consumed
  std::uint64_t credited_ = 0;  // consumed_, as last told to the peer
  Imm refused_ = 0;             // the last one that the peer was told of; 0 if none
  std::unordered_map<Imm, std::uint64_t> received_;
  std::unordered_map<Imm, std::uint64_t> delivered_;
};

}  // namespace kvxfer
