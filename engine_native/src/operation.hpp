// Submitted writes, and how far they got. Engine thread only once posted.
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

// No write on the wire is longer: bounds how long a lane is busy and lets large ones be shared
// out over lanes.
inline constexpr std::uint32_t kMaxWriteBytes = 1u << 20;

// One write on the wire. Offsets from the start of source and destination region.
struct WireWrite {
  std::uint64_t source = 0;
  std::uint64_t destination = 0;
  std::uint32_t length = 0;
  std::uint32_t grouped = 0;  // 1: the immediate of the next write that is not counts for it, too
};

// Writes that one immediate counts for: neighbours, which take one path, and that keeps their
// order. Long writes gain nothing from it, and are to be spread over paths.
inline constexpr std::size_t kMaxGroupWrites = 32;
inline constexpr std::uint64_t kMaxGroupBytes = 128u << 10;
inline constexpr std::uint32_t kLongWriteBytes = 64u << 10;

// Neighbours in an operation's list of writes; whole groups, where they carry an immediate.
struct WriteRange {
  std::size_t first = 0;
  std::size_t count = 0;
  bool counted = true;  // they carry the operation's immediate, if it has one
};

struct PeerHandle;
struct Submission;

// Writes out of one region into one region of one peer.
struct Operation {
  Submission* submission = nullptr;  // that it is a part of
  PeerId peer = 0;
  std::shared_ptr<PeerHandle> handle;  // of the peer; outlives it
  RegionPtr source;                    // null for an immediate without bytes
  std::uint64_t destination_key = 0;
  std::uint64_t destination_length = 0;         // as its descriptor says
  std::optional<std::uint8_t> destination_gpu;  // by its number there; none for host memory
  std::optional<Imm> imm;
  std::optional<std::uint32_t> nic;  // only over this NIC of ours
  WatchFor after;
  std::span<WireWrite> writes;  // of the submission's
  std::uint64_t bytes = 0;
  std::uint64_t total = 0;  // immediates of all of them
  std::uint64_t deadline_ns = 0;
  // What the peer's NICs need; looked up before the operation is posted on a NIC.
  std::shared_ptr<const RemoteRegion> destination;

  std::size_t posted = 0;       // writes[0, posted) were given to a path
  std::size_t outstanding = 0;  // of those, on a path now
  std::size_t finished = 0;     // delivered or refused
  // Came back from paths that were lost, to be posted on others.
  std::vector<WriteRange> reposts;
  // Of this immediate: to be posted again without it, because it did arrive, and not delivered
  // yet. Counted ones wait for them, so that a count never runs ahead of bytes; where nothing
  // delivers them any more, they fail. Null: none.
  std::shared_ptr<std::size_t> uncounted_left;
  bool arrived = false;  // the peer says that all its immediates have
  bool revoked = false;  // the peer counts its immediates no more, whether they have arrived or not
  bool queued = false;   // at its peer
  std::uint64_t question = 0;  // to the GPU that has its source (cuda::Gpu::ask); 0: none
  bool ended = false;          // as far as its caller is concerned
  unsigned losses = 0;         // of paths with its writes, in a row: none was delivered between
  std::size_t finished_at_loss = 0;   // at the last of them
  std::uint64_t lost_at_ns = 0;       // the last of them
  std::uint32_t newest_at_loss = 0;   // path at that time: older ones are lost with it
  std::size_t finished_at_grace = 0;  // when it last got more time to end
  Errc code = Errc::ok;               // first failure; nothing is posted after it
  std::string text;

  // How many immediates these writes carry.
  std::uint64_t immediates(const WriteRange& range) const {
    if (!imm || !range.counted) return 0;
    // GCC 12 turns a sum of them into vectors, built on the stack: 2 ns a write.
    const auto part = writes.subspan(range.first, range.count);
    return static_cast<std::uint64_t>(std::ranges::count(part, 0u, &WireWrite::grouped));
  }
  // What a batch of these writes says where the receiver places the bytes, which lets into a grant
  // what names its immediate. So do uncounted writes, each as if a later one counted for it, too.
  // A peer that knows no groups would count them.
  bool names_imm(const WriteRange& range, bool peer_knows_groups) const {
    return imm && (range.counted || peer_knows_groups);
  }
  static std::uint32_t grouped(const WriteRange& range, const WireWrite& write) {
    return range.counted ? write.grouped : 1;
  }
  // How many of these writes may go out as one batch: whole groups; the first one in any case.
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
  // The fewest of these writes, `fewest` at least, that are whole groups.
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

  // What to post next; empty while that has to wait.
  WriteRange next() const {
    if (code != Errc::ok) return {};
    if (reposts.empty()) return {posted, writes.size() - posted};
    const WriteRange& range = reposts.front();
    return range.counted && uncounted_left && *uncounted_left > 0 ? WriteRange{} : range;
  }
  // The first `count` writes of next() were posted.
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

// What a caller knows as one operation.
struct Submission {
  OperationId id = 0;
  std::uint64_t deadline_ns = 0;
  // Nothing is added to these or moved once it is submitted.
  std::vector<Operation> parts;
  std::vector<WireWrite> writes;  // of all parts, in their order
  std::size_t under_way = 0;      // parts that have not ended
  // Engine thread: how many OperationPtr there are, and while there are any, this.
  [[no_unique_address]] ThreadOwner thread;
  std::size_t uses = 0;
  std::shared_ptr<Submission> self;
};

using SubmissionPtr = std::shared_ptr<Submission>;

// A part, with which the whole lives. Engine thread only, so it counts without atomics.
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

// Keeps account of what is submitted. Engine thread only.
class OperationBook {
 public:
  // Nothing more of it is posted; it ends when nothing of it is under way.
  virtual void fail(const OperationPtr& operation, Errc code, std::string text) = 0;
  // Writes of it were finished or given back: it may have ended.
  virtual void settle(const OperationPtr& operation) = 0;
  // Those to the peer that carry the immediate.
  virtual std::vector<OperationPtr> with(PeerId peer, Imm imm) const = 0;

 protected:
  ~OperationBook() = default;
};

}  // namespace kvxfer
