// Submitted operations, until each has ended and its caller has the completion. Engine thread only,
// unless said otherwise.
#pragma once

#include <atomic>
#include <cassert>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "completion_queue.hpp"
#include "kvxfer/types.hpp"
#include "memory_region.hpp"
#include "operation.hpp"
#include "spare_writes.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class Operations final : public OperationBook {
 public:
  // `grace`: the time for writes under way when an operation has failed. Within it, a path that
  // delivers nothing is lost and closed; what remains is the peer's fault.
  Operations(EngineId engine, Duration grace, CompletionQueue& completions)
      : engine_(engine),
        grace_ns_(static_cast<std::uint64_t>(grace.count())),
        completions_(completions) {}
  ~Operations() { assert(submissions_.empty()); }
  Operations(const Operations&) = delete;
  Operations& operator=(const Operations&) = delete;

  // --- any thread
  OperationId next_id() { return ++last_; }
  SpareWrites& spare_writes() { return spare_writes_; }
  // Fails a submission that no engine takes any more.
  void refuse(Submission& submission, const Error& why);

  void begin(const SubmissionPtr& submission);
  void cancel(OperationId id);

  // --- operations that wait for a watched word
  bool holds_any() const { return !held_.empty(); }
  bool may_release() const;
  // Posts those that need not wait any more. Returns their number.
  std::size_t release_held();

  void on_finished(const OperationPtr& operation, const WriteRange& writes, const Error& error);
  void fail(const OperationPtr& operation, Errc code, std::string text) override;
  void settle(const OperationPtr& operation) override;
  std::vector<OperationPtr> with(PeerId peer, Imm imm) const override;
  // Ends all operations of a closed peer; nothing reads their sources any more.
  void end_all_of(PeerId peer, const Error& why);
  void fail_reading(const RegionPtr& region);
  // True if any operation that has not ended reads the region.
  bool reads(const MemoryRegion& region) const;
  // Called at every heartbeat: fails late operations, and loses peers that take no posted writes.
  void expire(std::uint64_t now);

 private:
  // Returns the operations under way that fit.
  template <typename Fits>
  std::vector<OperationPtr> those_that(Fits fits) const;
  void post(const OperationPtr& operation);
  void end(const OperationPtr& operation);
  void complete(const Submission& submission);

  [[no_unique_address]] ThreadOwner thread_;
  EngineId engine_;
  std::uint64_t grace_ns_;
  CompletionQueue& completions_;
  SpareWrites spare_writes_;
  std::atomic<OperationId> last_ = 0;
  std::unordered_map<OperationId, SubmissionPtr> submissions_;
  std::vector<OperationPtr> held_;
};

}  // namespace kvxfer
