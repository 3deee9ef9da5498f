// Submitted writes and their progress. Engine thread only once posted.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/types.hpp"
#include "memory_region.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

// The longest write on the wire: bounds how long a lane is busy, and lets lanes share large writes.
inline constexpr std::uint32_t kMaxWriteBytes = 1u << 20;

// One write on the wire. Offsets are from the start of the source and destination region.
struct WireWrite {
  std::uint64_t source = 0;
  std::uint64_t destination = 0;
  std::uint32_t length = 0;
  std::uint32_t grouped = 0;  // 1: the next ungrouped write's immediate counts for it, too
};

// Bounds of a group: neighbours that one immediate counts for, on one path that keeps their order.
// Long writes gain nothing from a group, and are spread over paths.
inline constexpr std::size_t kMaxGroupWrites = 32;
inline constexpr std::uint64_t kMaxGroupBytes = 128u << 10;
inline constexpr std::uint32_t kLongWriteBytes = 64u << 10;

// Neighbours in an operation's list of writes; whole groups if they carry an immediate.
struct WriteRange {
  std::size_t first = 0;
  std::size_t count = 0;
  bool counted = true;  // they carry the operation's immediate, if it has one
};

struct PeerHandle;
struct Submission;

// Writes from one region into one region of one peer.
struct Operation {
  Submission* submission = nullptr;  // the whole that it is part of
  PeerId peer = 0;
  std::shared_ptr<PeerHandle> handle;  // the peer's, which it outlives
  RegionPtr source;                    // null for an immediate without bytes
  std::uint64_t destination_key = 0;
  std::uint64_t destination_length = 0;         // from its descriptor
  std::optional<std::uint8_t> destination_gpu;  // number at the peer; no value: host memory
  std::optional<Imm> imm;
  std::optional<std::uint32_t> nic;  // the only NIC to use
  WatchFor after;
  std::span<WireWrite> writes;  // part of Submission::writes
  std::uint64_t bytes = 0;
  std::uint64_t total = 0;  // immediates of all writes
  std::uint64_t deadline_ns = 0;
  // The keys for the peer's NICs; looked up before the operation is posted on a NIC.
  std::shared_ptr<const RemoteRegion> destination;

  std::size_t posted = 0;       // writes[0, posted) were given to a path
  std::size_t outstanding = 0;  // posted writes that are on a path now
  std::size_t finished = 0;     // delivered or refused
  // Writes of lost paths, to be posted on others.
  std::vector<WriteRange> reposts;
  // The number of writes of this immediate that are to be posted again without it, because it did
  // arrive, and are not delivered yet. Counted writes wait for them, so that a count never runs
  // ahead of bytes; if nothing delivers them any more, the operations fail. Null: none.
  std::shared_ptr<std::size_t> uncounted_left;
  bool arrived = false;               // the peer reports that all its immediates have
  bool revoked = false;               // the peer no longer counts its immediates
  bool queued = false;                // in its peer's backlog
  std::uint64_t question = 0;         // put to the source's GPU (cuda::Gpu::ask); 0: none
  bool ended = false;                 // its caller needs no more of it
  unsigned losses = 0;                // paths lost in a row; no write was delivered between
  std::size_t finished_at_loss = 0;   // value of finished at the last loss
  std::uint64_t lost_at_ns = 0;       // time of the last loss
  std::uint32_t newest_at_loss = 0;   // newest path then; losing an older one is the same loss
  std::size_t finished_at_grace = 0;  // value of finished when it last got more time
  Errc code = Errc::ok;               // first failure; nothing is posted after it
  std::string text;

  // Returns how many immediates these writes carry.
  std::uint64_t immediates(const WriteRange& range) const {
    if (!imm || !range.counted) return 0;
    // GCC 12 vectorises a sum over the writes on the stack: 2 ns a write.
    const auto part = writes.subspan(range.first, range.count);
    return static_cast<std::uint64_t>(std::ranges::count(part, 0u, &WireWrite::grouped));
  }
  // True if a batch of these writes names the immediate. A receiver that places the bytes admits
  // into a grant only writes that name its immediate. Uncounted writes name it, too, each as if a
  // later one counted for it; a peer that knows no groups would count them.
  bool names_imm(const WriteRange& range, bool peer_knows_groups) const {
    return imm && (range.counted || peer_knows_groups);
  }
  static std::uint32_t grouped(const WriteRange& range, const WireWrite& write) {
    return range.counted ? write.grouped : 1;
  }
  // Returns how many of these writes may go out as one batch: whole groups, the first of any
  // length.
  std::size_t batch(const WriteRange& range, std::size_t most_writes, std::uint64_t most_bytes,
                    std::uint64_t most_immediates = UINT64_MAX) const {
    const bool counted = imm && range.counted;
    const std::size_t end = std::min(most_writes, range.count);
    std::size_t count = 0;
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < end && most_immediates > 0; ++i) {
      const WireWrite& write = writes[range.first + i];
      sum += write.length;
      if (counted && write.grouped != 0) continue;
      if (count > 0 && sum > most_bytes) break;
      count = i + 1;
      --most_immediates;
    }
    return count;
  }
  // Returns the smallest number of these writes, `fewest` at least, that is whole groups.
  std::size_t fill_group(const WriteRange& range, std::size_t fewest) const {
    std::size_t count = fewest;
    while (count < range.count && writes[range.first + count - 1].grouped != 0) ++count;
    return count;
  }

  bool held() const {
    return after.word && after.word->value.load(std::memory_order_acquire) < after.value;
  }
  bool wants_post() const {
    return code == Errc::ok && (posted < writes.size() || !reposts.empty());
  }
  bool done() const { return outstanding == 0 && !wants_post(); }

  // Returns the writes to post next; none while they have to wait.
  WriteRange next() const {
    if (code != Errc::ok) return {};
    if (reposts.empty()) return {posted, writes.size() - posted};
    const WriteRange& range = reposts.front();
    return range.counted && uncounted_left && *uncounted_left > 0 ? WriteRange{} : range;
  }
  // Notes that the first `count` writes of next() were posted.
  void took(std::size_t count) {
    outstanding += count;
    if (reposts.empty()) {
      posted += count;
      assert(ended || posted <= writes.size());
      return;
    }
    WriteRange& range = reposts.front();
    assert(count <= range.count);
    range.first += count;
    range.count -= count;
    if (range.count == 0) reposts.erase(reposts.begin());
  }
  void finish(const WriteRange& range, bool delivered) {
    assert(range.count <= outstanding);
    outstanding -= range.count;
    finished += range.count;
    if (range.counted || !delivered) return;
    assert(range.count <= *uncounted_left);
    *uncounted_left -= range.count;
  }
  void fail(Errc why, std::string what) {
    if (code != Errc::ok) return;
    code = why;
    text = std::move(what);
    reposts.clear();
  }
};

// One operation, as its caller knows it.
struct Submission {
  OperationId id = 0;
  std::uint64_t deadline_ns = 0;
  // Not resized once it is submitted.
  std::vector<Operation> parts;
  std::vector<WireWrite> writes;  // all parts', in their order
  std::size_t under_way = 0;      // parts that have not ended
  // Engine thread: the number of OperationPtrs and, while there are any, this submission.
  [[no_unique_address]] ThreadOwner thread;
  std::size_t uses = 0;
  std::shared_ptr<Submission> self;
};

using SubmissionPtr = std::shared_ptr<Submission>;

// A part, which keeps the whole alive. Engine thread only, so it counts without atomics.
class OperationPtr {
 public:
  OperationPtr() = default;
  OperationPtr(const SubmissionPtr& submission, Operation& part) : part_(&part) {
    part.submission = submission.get();
    submission->thread.check("OperationPtr");
    if (submission->uses++ == 0) submission->self = submission;
  }
  OperationPtr(const OperationPtr& other) : part_(other.part_) {
    if (!part_) return;
    part_->submission->thread.check("OperationPtr");
    ++part_->submission->uses;
  }
  OperationPtr(OperationPtr&& other) noexcept : part_(std::exchange(other.part_, nullptr)) {}
  OperationPtr& operator=(OperationPtr other) noexcept {
    std::swap(part_, other.part_);
    return *this;
  }
  ~OperationPtr() {
    if (!part_) return;
    part_->submission->thread.check("OperationPtr");
    if (--part_->submission->uses == 0) {
      const auto last = std::move(part_->submission->self);
    }
  }

  Operation* operator->() const { return part_; }
  Operation& operator*() const { return *part_; }
  explicit operator bool() const { return part_ != nullptr; }
  bool operator==(const OperationPtr&) const = default;

 private:
  Operation* part_ = nullptr;
};

// An account of submitted operations. Engine thread only.
class OperationBook {
 public:
  // Posts no more of it; it ends when none of its writes is under way.
  virtual void fail(const OperationPtr& operation, Errc code, std::string text) = 0;
  // Ends it if it is done, after writes were finished or given back.
  virtual void settle(const OperationPtr& operation) = 0;
  // Returns the operations for the peer that carry the immediate.
  virtual std::vector<OperationPtr> with(PeerId peer, Imm imm) const = 0;

 protected:
  ~OperationBook() = default;
};

}  // namespace kvxfer
