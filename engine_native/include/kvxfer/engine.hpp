// The engine's public interface. See docs/architecture.md for the picture.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvxfer/error.hpp"
#include "kvxfer/types.hpp"

namespace kvxfer {

class DomainGroup;
class MemoryRegion;
class SharedMemory;
struct PeerGroup;
struct PeerHandle;
struct Submission;
using PeerGroupPtr = std::shared_ptr<const PeerGroup>;
using PeerHandlePtr = std::shared_ptr<PeerHandle>;
using SubmissionPtr = std::shared_ptr<Submission>;
using RegionPtr = std::shared_ptr<MemoryRegion>;
using SharedMemoryPtr = std::shared_ptr<SharedMemory>;

// Returns the bytes of registered memory; none of a GPU's, which the processor cannot access.
std::span<std::byte> bytes_of(const RegionPtr& region);
// Returns what a peer needs to write into the region.
MrDescriptor descriptor_of(const RegionPtr& region);

// Allocates zeroed host memory that belongs to no engine. Peers on this host can map regions
// registered in it, as they can those of TransferEngine::allocate(). The memory lives as long as a
// pointer to it or a region in it.
Result<SharedMemoryPtr> allocate_shared(std::size_t bytes);
std::span<std::byte> bytes_of(const SharedMemoryPtr& memory);

// Returns the names of the fabrics in this build, whether or not the host supports them.
std::vector<std::string> built_fabrics();

// One-sided writes into the memory of peer engines. Every method may be called from any thread; one
// engine thread does the work. Results of asynchronous operations come as Completions: wait for
// event_fd() to be readable, then drain().
//
// An engine without a thread (EngineOptions::thread) belongs to the thread that created it: call
// every method there. poll() does the work, and event_fd() never becomes readable. Peers consider
// the engine dead if it is not polled for their peer_timeout.
//
// An engine belongs to the process that created it. In a forked process the destructor and the
// methods that end something (close, disconnect, deregister, release_counter) do nothing, methods
// that return a Result fail with engine-closed, and no other method may be called.
class TransferEngine {
 public:
  static Result<std::unique_ptr<TransferEngine>> create(EngineOptions options);
  ~TransferEngine();
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // Ends every operation with engine-closed and stops the engine thread. Idempotent.
  void close();
  // Fails with engine-closed in a process that was forked from the engine's.
  Result<void> require_own_process() const;

  const EngineAddress& address() const;
  EngineStats stats() const;
  // Returns the names of the fabrics in use, in order of preference.
  const std::vector<std::string>& fabrics() const;
  // Returns the NICs of this engine, by the number that WriteOptions::nic takes.
  const std::vector<NicInfo>& nics() const;

  // For an engine without a thread: does the work that is ready, without sleeping. Returns true if
  // anything moved. Methods that wait for the engine do the same work meanwhile.
  bool poll();

  // --- completions
  int event_fd() const;
  std::vector<Completion> drain();

  // --- memory
  // If a NIC that is up does not reach the memory, other fabrics carry its bytes, and a notice
  // reports it once; without tcp, or with `require_nics`, registration fails with
  // fabric-unavailable. `require_nics` also fails if the engine has no NIC.
  //
  // Allocates zeroed memory that peers on this host can map: the local fabric's fastest source.
  Result<RegionPtr> allocate(std::size_t bytes, bool require_nics = false);
  // Allocates zeroed memory on a GPU, by CUDA's number in this process. Loads CUDA's driver.
  Result<RegionPtr> allocate_on_gpu(int device, std::size_t bytes, bool require_nics = false);
  // Registers memory of the caller, on the host or on a GPU; the CUDA driver reports which if the
  // process has loaded it. The memory must stay valid until deregister() has returned.
  Result<RegionPtr> register_memory(void* address, std::size_t bytes, bool require_nics = false);
  // Cancels the operations that read the region and waits for them. After it has returned, no write
  // of a peer lands in the region. Fails with nic-lost if a NIC does not release the memory, and
  // with deadline-exceeded if a peer on this host has kept memory of a GPU open for peer_timeout:
  // then the memory must not be freed, and the call may be repeated.
  Result<void> deregister(const RegionPtr& region);

  // --- peers
  // Connects to an engine. Completion::Kind::connect with the returned id follows, and peer_up too
  // if the peer was not connected.
  OperationId connect(const EngineAddress& address, Duration timeout);
  // Both end the connection: once they have returned, no write of the peer lands. disconnect()
  // first tells the peer; fence() fails with peer-lost if the peer is not connected.
  void disconnect(PeerId peer);
  Result<void> fence(PeerId peer);
  // Sends a message of at most kMaxMessageBytes. Messages to one peer keep their order among
  // themselves, but not relative to writes.
  Result<void> send(PeerId peer, std::string data);

  // --- writes. One Completion::Kind::write with the operation's id follows once every byte is
  // delivered, or once the operation has failed and no longer reads its source.
  Result<Submitted> write(PeerId peer, const RegionPtr& source, const MrDescriptor& destination,
                          const SingleWrite& write, const WriteOptions& options = {});
  Result<Submitted> write_pages(PeerId peer, const RegionPtr& source,
                                const MrDescriptor& destination, const PagedWrite& pages,
                                const WriteOptions& options = {});
  // Writes from any regions into any regions of one peer, as one operation with one total of
  // immediates. Submits all writes or none.
  Result<Submitted> write_list(PeerId peer, std::span<const ListedWrite> list,
                               const WriteOptions& options = {});
  Result<Submitted> write_imm(PeerId peer, Imm imm, const WriteOptions& options = {});
  // Looks up peers once, for scatter() and barrier(). Parts for a peer that is lost later fail.
  Result<PeerGroupPtr> peer_group(std::span<const PeerId> peers) const;
  // Writes to each peer its parts, from one region, as one operation. Submits all parts or none.
  Result<Scattered> scatter(const RegionPtr& source, const PeerGroupPtr& group,
                            std::span<const ScatterPart> parts, const WriteOptions& options = {});
  // Sends the immediate to each peer of the group, in the same way.
  Result<Scattered> barrier(const PeerGroupPtr& group, Imm imm, const WriteOptions& options = {});
  // Returns a word, initially zero, for WriteOptions::after. Writes start once the word has reached
  // their value: at once after wake(); after a plain store within 100 microseconds, or within a
  // sixteenth of the time since anything moved if that is longer, but at most 1 ms.
  static std::shared_ptr<WatchWord> watch_word() { return std::make_shared<WatchWord>(); }
  void wake();
  // Returns a watch word that streams of this GPU count up.
  Result<std::shared_ptr<StreamWord>> stream_word(int device);
  // Stops posting writes of the operation; those already posted run to their end. The completion
  // reports cancelled, or ok if the operation ended first.
  void cancel(OperationId operation);

  // --- counters (receiving side)
  // Allocates a counter. With `writer`, only that peer's immediates count, and releasing the
  // counter asks no other peer.
  Result<Imm> allocate_counter(std::optional<PeerId> writer = std::nullopt);
  std::uint64_t counter_value(Imm imm) const;
  // Requests Completion::Kind::counter once the counter has reached `total`. Replaces an earlier
  // total, and drops its completion if that was not drained.
  Result<void> expect(Imm imm, std::uint64_t total, Expect expect = Expect::exactly);
  // Queues a wait on a CUstream of this GPU's primary context: work queued behind it runs once the
  // counter has reached `total`. The wait also ends when the counter is released, when more
  // immediates arrive than `expect` allows, after `timeout` (0: the engine's operation_timeout),
  // and when the engine is closed: check StreamWait::reached() before using results of the work
  // behind it. Not for a stream that is being captured.
  Result<std::shared_ptr<StreamWait>> wait_on_stream(int device, void* stream, Imm imm,
                                                     std::uint64_t total, Duration timeout,
                                                     Expect expect = Expect::exactly);
  // Returns a word that kernels of this GPU may read and that follows the count from now on.
  // Kernels see the bytes that were counted; those that a NIC wrote (GPUDirect) only in work that
  // begins later. The word also shows that the counter was released or the engine closed.
  Result<std::shared_ptr<CounterMirror>> mirror_counter(int device, Imm imm);
  // Requests Completion::Kind::arrival when the counter next grows. Each take_arrivals(), which
  // returns the count, requests another.
  Result<void> subscribe(Imm imm);
  std::uint64_t take_arrivals(Imm imm);
  // Returns descriptors that permit the counter's writer to write into these ranges with this
  // immediate until the counter is released. docs/protocol.md says what each fabric enforces.
  Result<std::vector<MrDescriptor>> grant(Imm imm, std::span<const RegionRange> ranges);
  // Releases the counter. After it has returned, no write with the immediate lands or counts.
  void release_counter(Imm imm);
  // Releases the counter without waiting for peers. Returns true if it is done; otherwise a
  // Completion::Kind::released follows.
  bool begin_release_counter(Imm imm);

 private:
  explicit TransferEngine(std::unique_ptr<DomainGroup> group);
  // Returns the error for a peer that is not connected.
  Error no_peer(PeerId peer) const;
  SubmissionPtr begin(std::size_t parts, const WriteOptions& options) const;
  // Add a part to the submission.
  struct Part;
  Result<void> add(Submission& submission, const PeerHandlePtr& handle, const Part& part,
                   const WriteOptions& options) const;
  Result<void> add_single(Submission& submission, const PeerHandlePtr& handle,
                          const RegionPtr& source, const MrDescriptor& destination,
                          const SingleWrite& write, const WriteOptions& options) const;
  Result<void> add_imm(Submission& submission, const PeerHandlePtr& handle,
                       const WriteOptions& options) const;
  // Submit the parts, or withdraw them if `added` is an error.
  Result<Scattered> submit(const SubmissionPtr& submission, const Result<void>& added);
  Result<Submitted> submit_one(const SubmissionPtr& submission, const Result<void>& added);
  std::unique_ptr<DomainGroup> group_;
};

}  // namespace kvxfer
