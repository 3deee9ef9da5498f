#include "kvxfer/engine.hpp"

#include <numeric>
#include <string>

#include "clock.hpp"
#include "group/domain_group.hpp"
#include "paged_write.hpp"

namespace kvxfer {
namespace {

// Bounds of what is queued for one peer, above which submitting fails with backpressure.
constexpr std::uint64_t kMaxQueuedWrites = 4u << 20;
constexpr std::uint64_t kMaxQueuedMessageBytes = 16u << 20;

Result<void> check_destination(const PeerHandle& peer, const MrDescriptor& destination,
                               std::optional<Imm> imm) {
  if (destination.engine != peer.engine) {
    return Error{Errc::unknown_region, "the destination region belongs to engine " +
                                           destination.engine.hex() + ", not to peer " +
                                           peer.label};
  }
  if (destination.imm == 0 || destination.imm == imm) return {};
  return Error{Errc::invalid_argument,
               "the descriptor is a grant of peer " + peer.label +
                   ", which takes only writes with the immediate of its counter, imm=" +
                   std::to_string(destination.imm) + "; this one has " +
                   (imm ? "imm=" + std::to_string(*imm) : std::string("none"))};
}

// Returns the least number of writes into which a large one is split.
unsigned shards_of(const PeerHandle& peer, const WriteOptions& options) {
  return options.nic ? 1 : peer.shards.load();
}

}  // namespace

// A part of a submission: `count` of its writes, from `first`. An immediate alone has no regions.
struct TransferEngine::Part {
  const RegionPtr* source = nullptr;
  const MrDescriptor* destination = nullptr;
  std::size_t first = 0;
  std::size_t count = 0;
  std::uint64_t bytes = 0;
};

Result<std::unique_ptr<TransferEngine>> TransferEngine::create(EngineOptions options) {
  auto group = DomainGroup::open(std::move(options));
  if (!group) return group.error();
  return std::unique_ptr<TransferEngine>(new TransferEngine(std::move(*group)));
}

TransferEngine::TransferEngine(std::unique_ptr<DomainGroup> group) : group_(std::move(group)) {}
TransferEngine::~TransferEngine() {
  // In a forked process, the threads to wait for and the NICs to close are the parent's.
  if (!require_own_process()) [[maybe_unused]]
    const auto* const of_parent = group_.release();
}

Result<void> TransferEngine::require_own_process() const { return group_->require_own_process(); }
void TransferEngine::close() { group_->close(); }
bool TransferEngine::poll() { return group_->poll(); }
const EngineAddress& TransferEngine::address() const { return group_->address(); }
EngineStats TransferEngine::stats() const { return group_->stats(); }
int TransferEngine::event_fd() const { return group_->completions().event_fd(); }
std::vector<Completion> TransferEngine::drain() {
  if (!require_own_process()) return {};
  return group_->completions().drain();
}

const std::vector<std::string>& TransferEngine::fabrics() const { return group_->fabrics(); }
const std::vector<NicInfo>& TransferEngine::nics() const { return group_->nics(); }

// --- memory ----------------------------------------------------------------------------------

Result<RegionPtr> TransferEngine::allocate(std::size_t bytes, bool require_nics) {
  if (auto good = group_->require_open(); !good) return good.error();
  auto region = MemoryRegion::allocate(address().engine, bytes);
  if (!region) return region;
  if (auto good = group_->register_region(*region, require_nics); !good) return good.error();
  return region;
}

Result<RegionPtr> TransferEngine::allocate_on_gpu(int device, std::size_t bytes,
                                                  bool require_nics) {
  if (auto good = group_->require_open(); !good) return good.error();
  auto gpu = group_->gpus().open(device);
  if (!gpu) return gpu.error();
  auto region = MemoryRegion::allocate_on(address().engine, std::move(*gpu), bytes);
  if (!region) return region;
  if (auto good = group_->register_region(*region, require_nics); !good) return good.error();
  return region;
}

Result<std::shared_ptr<StreamWord>> TransferEngine::stream_word(int device) {
  if (auto good = group_->require_open(); !good) return good.error();
  auto gpu = group_->gpus().open(device);
  if (!gpu) return gpu.error();
  return cuda::CountedWord::create(std::move(*gpu));
}

Result<std::shared_ptr<StreamWait>> TransferEngine::wait_on_stream(int device, void* stream,
                                                                   Imm imm, std::uint64_t total,
                                                                   Duration timeout,
                                                                   Expect expect) {
  if (auto good = group_->require_own_process(); !good) return good.error();
  auto gpu = group_->gpus().open(device);
  if (!gpu) return gpu.error();
  auto queued = cuda::QueuedWait::queue(std::move(*gpu), stream);
  if (!queued) return queued.error();
  if (timeout == Duration::zero()) timeout = group_->options().operation_timeout;
  group_->wait_for_stream({.wait = *queued,
                           .imm = imm,
                           .total = total,
                           .expect = expect,
                           .deadline_ns = now_ns() + static_cast<std::uint64_t>(timeout.count())});
  return std::shared_ptr<StreamWait>(std::move(*queued));
}

Result<std::shared_ptr<CounterMirror>> TransferEngine::mirror_counter(int device, Imm imm) {
  if (auto good = group_->require_open(); !good) return good.error();
  auto gpu = group_->gpus().open(device);
  if (!gpu) return gpu.error();
  auto mirror = cuda::MirroredCount::create(std::move(*gpu));
  if (!mirror) return mirror.error();
  group_->mirror_counter(imm, *mirror);
  return std::shared_ptr<CounterMirror>(std::move(*mirror));
}

Result<RegionPtr> TransferEngine::register_memory(void* data, std::size_t bytes,
                                                  bool require_nics) {
  if (auto good = group_->require_open(); !good) return good.error();
  auto gpu = group_->gpus().owner_of(data, bytes);
  if (!gpu) return gpu.error();
  auto region = MemoryRegion::wrap(address().engine, data, bytes, std::move(*gpu));
  if (!region) return region;
  if (auto good = group_->register_region(*region, require_nics); !good) return good.error();
  return region;
}

Result<void> TransferEngine::deregister(const RegionPtr& region) {
  if (!require_own_process()) return {};
  return group_->deregister(region);
}

// --- peers -----------------------------------------------------------------------------------

OperationId TransferEngine::connect(const EngineAddress& target, Duration timeout) {
  const OperationId id = group_->next_operation_id();
  group_->connect(id, target, timeout);
  return id;
}

// The loss of the peer may not have been reported yet.
Error TransferEngine::no_peer(PeerId peer) const {
  if (const auto good = group_->require_open(); !good) return good.error();
  return {Errc::peer_lost, "no peer " + std::to_string(peer) +
                               " is connected to this engine (any more); connect again"};
}

void TransferEngine::disconnect(PeerId peer) { group_->disconnect(peer); }

Result<void> TransferEngine::fence(PeerId peer) {
  if (!group_->fence(peer)) return no_peer(peer);
  return {};
}

Result<void> TransferEngine::send(PeerId peer, std::string data) {
  const auto handle = group_->find_peer(peer);
  if (!handle) return no_peer(peer);
  if (data.size() > kMaxMessageBytes) {
    return Error{Errc::message_too_large, "a message of " + std::to_string(data.size()) +
                                              " bytes; the limit is 1 MiB, use writes for more"};
  }
  if (handle->queued_message_bytes.fetch_add(message_charge(data.size())) >
      kMaxQueuedMessageBytes) {
    handle->queued_message_bytes -= message_charge(data.size());
    return Error{Errc::backpressure,
                 "16 MiB of messages already wait for peer " + handle->label + "; send later"};
  }
  group_->send(peer, std::move(data));
  return {};
}

// --- writes ----------------------------------------------------------------------------------

SubmissionPtr TransferEngine::begin(std::size_t parts, const WriteOptions& options) const {
  auto submission = std::make_shared<Submission>();
  submission->id = group_->next_operation_id();
  submission->parts.reserve(parts);
  Duration timeout = options.timeout;
  if (timeout <= Duration::zero()) timeout = group_->options().operation_timeout;
  submission->deadline_ns = now_ns() + static_cast<std::uint64_t>(timeout.count());
  return submission;
}

Result<void> TransferEngine::add(Submission& submission, const PeerHandlePtr& handle,
                                 const Part& part, const WriteOptions& options) const {
  if (options.nic && *options.nic >= group_->nics().size()) {
    return Error{Errc::invalid_argument, "this engine has no NIC number " +
                                             std::to_string(*options.nic) + "; it has " +
                                             std::to_string(group_->nics().size())};
  }
  if (part.destination) {
    if (auto good = check_destination(*handle, *part.destination, options.imm); !good) return good;
  }
  if (handle->queued_writes.fetch_add(part.count) + part.count > kMaxQueuedWrites) {
    handle->queued_writes -= part.count;
    return Error{Errc::backpressure, "peer " + handle->label + " has " +
                                         std::to_string(kMaxQueuedWrites) +
                                         " writes queued; wait for some to complete"};
  }
  Operation& operation = submission.parts.emplace_back();
  operation.peer = handle->id;
  operation.handle = handle;
  if (part.source) operation.source = *part.source;
  operation.destination_key = part.destination ? part.destination->key : 0;
  operation.destination_length = part.destination ? part.destination->length : 0;
  if (part.destination && part.destination->kind == MemoryKind::cuda) {
    operation.destination_gpu = part.destination->device;
  }
  operation.imm = options.imm;
  operation.nic = options.nic;
  if (options.after.word) operation.after = options.after;
  operation.writes = std::span(submission.writes).subspan(part.first, part.count);
  if (options.imm) {
    const bool grouped = part.count > 1 && handle->groups;
    operation.total = grouped ? form_groups(operation.writes) : part.count;
  }
  operation.bytes = part.bytes;
  operation.deadline_ns = submission.deadline_ns;
  return {};
}

Result<void> TransferEngine::add_single(Submission& submission, const PeerHandlePtr& handle,
                                        const RegionPtr& source, const MrDescriptor& destination,
                                        const SingleWrite& write,
                                        const WriteOptions& options) const {
  const std::size_t first = submission.writes.size();
  if (auto good = plan_single(write, source->size(), destination.length,
                              shards_of(*handle, options), submission.writes);
      !good) {
    return good;
  }
  return add(submission, handle,
             {&source, &destination, first, submission.writes.size() - first, write.length},
             options);
}

Result<void> TransferEngine::add_imm(Submission& submission, const PeerHandlePtr& handle,
                                     const WriteOptions& options) const {
  submission.writes.emplace_back();
  return add(submission, handle, {.first = submission.writes.size() - 1, .count = 1}, options);
}

Result<Scattered> TransferEngine::submit(const SubmissionPtr& submission,
                                         const Result<void>& added) {
  // Withdraw the parts that were added before.
  if (!added) {
    for (Operation& part : submission->parts) part.handle->queued_writes -= part.writes.size();
    return added.error();
  }
  Scattered scattered{.id = submission->id};
  scattered.immediates.reserve(submission->parts.size());
  WireWrite* writes = submission->writes.data();  // moved as the list grew
  for (Operation& part : submission->parts) {
    part.writes = {writes, part.writes.size()};
    writes += part.writes.size();
    scattered.immediates.push_back(part.total);
    scattered.bytes += part.bytes;
  }
  scattered.writes = submission->writes.size();
  group_->submit(submission);
  return scattered;
}

Result<Submitted> TransferEngine::submit_one(const SubmissionPtr& submission,
                                             const Result<void>& added) {
  const auto scattered = submit(submission, added);
  if (!scattered) return scattered.error();
  const auto& immediates = scattered->immediates;
  return Submitted{
      .id = scattered->id,
      .writes = scattered->writes,
      .immediates = std::accumulate(immediates.begin(), immediates.end(), std::uint64_t{0}),
      .bytes = scattered->bytes};
}

Result<Submitted> TransferEngine::write(PeerId peer, const RegionPtr& source,
                                        const MrDescriptor& destination, const SingleWrite& write,
                                        const WriteOptions& options) {
  const auto handle = group_->find_peer(peer);
  if (!handle) return no_peer(peer);
  const auto submission = begin(1, options);
  return submit_one(submission,
                    add_single(*submission, handle, source, destination, write, options));
}

Result<Submitted> TransferEngine::write_pages(PeerId peer, const RegionPtr& source,
                                              const MrDescriptor& destination,
                                              const PagedWrite& pages,
                                              const WriteOptions& options) {
  const auto handle = group_->find_peer(peer);
  if (!handle) return no_peer(peer);
  const auto submission = begin(1, options);
  auto& writes = submission->writes;
  writes = group_->spare_writes().take(pages.source_pages.size());
  auto added = plan_pages(pages, source->size(), destination.length, writes);
  const std::uint64_t bytes = pages.source_pages.size() * pages.page_length;
  if (added) {
    added = add(*submission, handle, {&source, &destination, 0, writes.size(), bytes}, options);
  }
  return submit_one(submission, added);
}

Result<Submitted> TransferEngine::write_list(PeerId peer, std::span<const ListedWrite> list,
                                             const WriteOptions& options) {
  if (list.empty()) {
    return Error{Errc::invalid_argument, "nothing to write: the list is empty"};
  }
  const auto handle = group_->find_peer(peer);
  if (!handle) return no_peer(peer);
  const auto submission = begin(0, options);
  const auto parts = plan_list(list, shards_of(*handle, options), submission->writes);
  if (!parts) return parts.error();
  std::size_t first = 0;
  Result<void> added;
  for (const ListedPart& part : *parts) {
    const auto& [source, destination, write] = *part.first;
    added =
        add(*submission, handle, {&source, &destination, first, part.count, part.bytes}, options);
    if (!added) break;
    first += part.count;
  }
  return submit_one(submission, added);
}

Result<Submitted> TransferEngine::write_imm(PeerId peer, Imm imm, const WriteOptions& options) {
  const auto handle = group_->find_peer(peer);
  if (!handle) return no_peer(peer);
  WriteOptions counted = options;
  counted.imm = imm;
  const auto submission = begin(1, options);
  return submit_one(submission, add_imm(*submission, handle, counted));
}

Result<PeerGroupPtr> TransferEngine::peer_group(std::span<const PeerId> peers) const {
  auto group = std::make_shared<PeerGroup>();
  for (const PeerId peer : peers) {
    group->peers.push_back(group_->find_peer(peer));
    if (!group->peers.back()) return no_peer(peer);
  }
  return PeerGroupPtr(std::move(group));
}

Result<Scattered> TransferEngine::scatter(const RegionPtr& source, const PeerGroupPtr& group,
                                          std::span<const ScatterPart> parts,
                                          const WriteOptions& options) {
  const auto submission = begin(parts.size(), options);
  submission->writes.reserve(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [member, destination, write] = parts[i];
    const auto refused = [&](const Error& error) {
      return submit(submission, Error{error.code, "part " + std::to_string(i) +
                                                      " of the scatter: " + error.text});
    };
    if (member >= group->peers.size()) {
      return refused(
          {Errc::invalid_argument, "the group has " + std::to_string(group->peers.size()) +
                                       " peers; there is no member " + std::to_string(member)});
    }
    const PeerHandlePtr& handle = group->peers[member];
    const auto added = write.length == 0
                           ? add_imm(*submission, handle, options)
                           : add_single(*submission, handle, source, destination, write, options);
    if (!added) return refused(added.error());
  }
  return submit(submission, {});
}

Result<Scattered> TransferEngine::barrier(const PeerGroupPtr& group, Imm imm,
                                          const WriteOptions& options) {
  WriteOptions counted = options;
  counted.imm = imm;
  const auto submission = begin(group->peers.size(), options);
  Result<void> added;
  for (const auto& handle : group->peers) {
    added = add_imm(*submission, handle, counted);
    if (!added) break;
  }
  return submit(submission, added);
}

void TransferEngine::wake() { group_->wake(); }

void TransferEngine::cancel(OperationId operation) { group_->cancel(operation); }

// --- counters --------------------------------------------------------------------------------

Result<Imm> TransferEngine::allocate_counter(std::optional<PeerId> writer) {
  if (auto good = group_->require_open(); !good) return good.error();
  return group_->counters().allocate(writer);
}

std::uint64_t TransferEngine::counter_value(Imm imm) const { return group_->counters().value(imm); }

Result<void> TransferEngine::expect(Imm imm, std::uint64_t total, Expect expect) {
  if (auto good = group_->require_open(); !good) return good;
  return group_->counters().expect(imm, total, expect);
}

Result<void> TransferEngine::subscribe(Imm imm) {
  if (auto good = group_->require_open(); !good) return good;
  return group_->counters().subscribe(imm);
}

std::uint64_t TransferEngine::take_arrivals(Imm imm) {
  return group_->counters().take_arrivals(imm);
}

Result<std::vector<MrDescriptor>> TransferEngine::grant(Imm imm,
                                                        std::span<const RegionRange> ranges) {
  if (auto good = group_->require_open(); !good) return good.error();
  return group_->grant(imm, ranges);
}

void TransferEngine::release_counter(Imm imm) { group_->release_counter(imm, true); }

bool TransferEngine::begin_release_counter(Imm imm) { return group_->release_counter(imm, false); }

}  // namespace kvxfer
