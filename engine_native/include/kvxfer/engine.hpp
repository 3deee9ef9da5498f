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

// Registered memory, which an engine gives out: its bytes (none of a GPU's, which the processor
// cannot touch), and what a peer needs to write there.
std::span<std::byte> bytes_of(const RegionPtr& region);
MrDescriptor descriptor_of(const RegionPtr& region);

// Zeroed host memory that belongs to no engine: what is registered of it, peers on this host can
// map, as what TransferEngine::allocate() gives. It lives as long as a pointer to it, or a region.
Result<SharedMemoryPtr> allocate_shared(std::size_t bytes);
std::span<std::byte> bytes_of(const SharedMemoryPtr& memory);

// Names of the fabrics that this build has, whether or not the host does.
std::vector<std::string> built_fabrics();

// One-sided writes into the memory of peer engines. Every method may be called from any thread;
// one engine thread per domain group does the work. Results of asynchronous operations come as
// Completions: wait for event_fd() to be readable, then drain().
//
// An engine without a thread (EngineOptions::thread) belongs to the thread that made it: every
// method is called there, poll() does the work, and event_fd() never becomes readable. Its peers
// take it for dead when it is not polled for their peer_timeout.
//
// An engine belongs to the process that made it. In a forked one the destructor and what ends
// something (close, disconnect, deregister, release_counter) only let go, methods that return a
// Result are refused, and no other is to be called.
class TransferEngine {
 public:
  static Result<std::unique_ptr<TransferEngine>> create(EngineOptions options);
  ~TransferEngine();
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // Ends every operation with engine-closed and joins the engine thread. Idempotent.
  void close();
  // Fails with engine-closed in a process that was forked from the engine's.
  Result<void> require_own_process() const;

  const EngineAddress& address() const;
  EngineStats stats() const;
  // The fabrics in use, in the order in which they are preferred.
  const std::vector<std::string>& fabrics() const;
  // By number, for WriteOptions::nic.
  const std::vector<NicInfo>& nics() const;

  // Without a thread: does what there is to do, and never sleeps. Whether anything moved. Methods
  // that wait for the engine do the same meanwhile.
  bool poll();

  // --- completions
  int event_fd() const;
  std::vector<Completion> drain();

  // --- memory
  // `require_nics`: fails with fabric-unavailable where there is no NIC, or one that is up does not
  // reach the memory itself; else it goes another way there, and a notice tells of it once.
  // Zeroed memory that peers on this host can map: the fastest source for the local fabric.
  Result<RegionPtr> allocate(std::size_t bytes, bool require_nics = false);
  // Likewise on a GPU, by CUDA's number in this process. Loads CUDA's driver.
  Result<RegionPtr> allocate_on_gpu(int device, std::size_t bytes, bool require_nics = false);
  // Memory of the caller's, of the host or of a GPU: the CUDA driver that the process has loaded
  // says which. It must stay valid until deregister() returned.
  Result<RegionPtr> register_memory(void* address, std::size_t bytes, bool require_nics = false);
  // Cancels the operations that read the region and waits for them. No write of any peer lands
  // in it after this returned. Fails with nic-lost where a NIC does not let go of the memory, and
  // with deadline-exceeded where a peer of this host has kept memory of a GPU open for
  // peer_timeout: it must not be freed then, and this may be called again.
  Result<void> deregister(const RegionPtr& region);

  // --- peers
  // Completion::Kind::connect with this id follows; peer_up too if the peer was not connected.
  OperationId connect(const EngineAddress& address, Duration timeout);
  void disconnect(PeerId peer);
  // After this returned, no write of the peer lands any more. The peer is lost to this engine.
  Result<void> fence(PeerId peer);
  // Ordered among messages to one peer, not among writes. At most kMaxMessageBytes.
  Result<void> send(PeerId peer, std::string data);

  // --- writes: one Completion::Kind::write with the operation's id follows, when every byte is
  // delivered or the operation has failed for good and no longer reads its source.
  Result<Submitted> write(PeerId peer, const RegionPtr& source, const MrDescriptor& destination,
                          const SingleWrite& write, const WriteOptions& options = {});
  Result<Submitted> write_pages(PeerId peer, const RegionPtr& source,
                                const MrDescriptor& destination, const PagedWrite& pages,
                                const WriteOptions& options = {});
  // Many writes to one peer, out of any regions into any regions: one operation, and one total. All
  // are submitted, or none.
  Result<Submitted> write_list(PeerId peer, std::span<const ListedWrite> list,
                               const WriteOptions& options = {});
  Result<Submitted> write_imm(PeerId peer, Imm imm, const WriteOptions& options = {});
  // Peers that operations go to together, looked up once. Parts for one that is lost later fail.
  Result<PeerGroupPtr> peer_group(std::span<const PeerId> peers) const;
  // Each its parts, out of one region: one operation. All are submitted, or none.
  Result<Scattered> scatter(const RegionPtr& source, const PeerGroupPtr& group,
                            std::span<const ScatterPart> parts, const WriteOptions& options = {});
  // The immediate to each, likewise.
  Result<Scattered> barrier(const PeerGroupPtr& group, Imm imm, const WriteOptions& options = {});
  // A word at zero for WriteOptions::after. Whatever adds to it starts what was held back for the
  // value: wake() at once, a plain store within 100 microseconds, or within a sixteenth of
  // the time that nothing was moved for, where that is longer: 1 ms at most.
  static std::shared_ptr<WatchWord> watch_word() { return std::make_shared<WatchWord>(); }
  void wake();
  // A watch word that streams of this GPU count up.
  Result<std::shared_ptr<StreamWord>> stream_word(int device);
  // Stops posting; what is posted is waited for. The completion says cancelled, or ok if the
  // operation was faster.
  void cancel(OperationId operation);

  // --- counters (receiving side)
  // `writer`: the only peer that will be told of it, so that releasing it asks no other.
  Result<Imm> allocate_counter(std::optional<PeerId> writer = std::nullopt);
  std::uint64_t counter_value(Imm imm) const;
  // Completion::Kind::counter follows once the counter has reached `total`; none of an earlier
  // total, reached or not, that was not drained before.
  Result<void> expect(Imm imm, std::uint64_t total, Expect expect = Expect::exactly);
  // Queues on a CUstream of this GPU's primary context that what follows in it waits until the
  // counter has reached `total`. It is let go on, too, when the counter is released, when more
  // arrive than `expect` allows, after `timeout` (0: the engine's operation_timeout), and when the
  // engine is closed: read StreamWait::reached() before anything that the stream computed behind it
  // is used. Not for a stream that is captured.
  Result<std::shared_ptr<StreamWait>> wait_on_stream(int device, void* stream, Imm imm,
                                                     std::uint64_t total, Duration timeout,
                                                     Expect expect = Expect::exactly);
  // A word that kernels of this GPU may read, which follows the count from now on. Bytes that were
  // counted are there for them, those that a NIC wrote (GPUDirect) for work that begins later. It
  // also tells when the counter is released, or the engine closed.
  Result<std::shared_ptr<CounterMirror>> mirror_counter(int device, Imm imm);
  // Completion::Kind::arrival follows whenever the counter has grown since take_arrivals(), which
  // returns its count.
  Result<void> subscribe(Imm imm);
  std::uint64_t take_arrivals(Imm imm);
  // Descriptors of these ranges for the counter's writer, which may write there with this immediate
  // and until the counter is released. What each fabric enforces: docs/protocol.md.
  Result<std::vector<MrDescriptor>> grant(Imm imm, std::span<const RegionRange> ranges);
  // After this returned, no write that carries the immediate lands or counts.
  void release_counter(Imm imm);
  // The same without waiting for peers: true if it is done, else Completion::Kind::released
  // follows.
  bool begin_release_counter(Imm imm);

 private:
  explicit TransferEngine(std::unique_ptr<DomainGroup> group);
  // Why there is no such peer.
  Error no_peer(PeerId peer) const;
  SubmissionPtr begin(std::size_t parts, const WriteOptions& options) const;
  // Add a part to what is to be submitted.
  struct Part;
  Result<void> add(Submission& submission, const PeerHandlePtr& handle, const Part& part,
                   const WriteOptions& options) const;
  Result<void> add_single(Submission& submission, const PeerHandlePtr& handle,
                          const RegionPtr& source, const MrDescriptor& destination,
                          const SingleWrite& write, const WriteOptions& options) const;
  Result<void> add_imm(Submission& submission, const PeerHandlePtr& handle,
                       const WriteOptions& options) const;
  // Unless adding a part has failed.
  Result<Scattered> submit(const SubmissionPtr& submission, const Result<void>& added);
  Result<Submitted> submit_one(const SubmissionPtr& submission, const Result<void>& added);
  std::unique_ptr<DomainGroup> group_;
};

}  // namespace kvxfer
