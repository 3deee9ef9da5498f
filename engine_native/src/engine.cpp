#include "kvxfer/engine.hpp"

#include <string>

#include "clock.hpp"
#include "domain_group.hpp"
#include "paged_write.hpp"

namespace kvxfer {
namespace {

// What may be queued for one peer before submitting fails with backpressure.
constexpr std::uint64_t kMaxQueuedWrites = 4u << 20;
constexpr std::uint64_t kMaxQueuedMessageBytes = 16u << 20;

Error no_peer(PeerId peer) {
  return {Errc::unknown_peer, "no peer " + std::to_string(peer) +
                                  " is connected to this engine; connect first, or again"};
}

Result<void> check_destination(const PeerHandle& peer, const MrDescriptor& destination) {
  if (destination.engine == peer.engine) return {};
  return Error{Errc::unknown_region, "the destination region belongs to engine " +
                                         destination.engine.hex() + ", not to peer " + peer.label};
}

// What was added before.
Error give_back(const Submission& submission, const Result<void>& added) {
  for (const Operation& part : submission.parts) part.handle->queued_writes -= part.writes.size();
  return added.error();
}

}  // namespace

Result<std::unique_ptr<TransferEngine>> TransferEngine::create(EngineOptions options) {
  auto group = DomainGroup::open(std::move(options));
  if (!group) return group.error();
  return std::unique_ptr<TransferEngine>(new TransferEngine(std::move(*group)));
}

TransferEngine::TransferEngine(std::unique_ptr<DomainGroup> group) : group_(std::move(group)) {}
TransferEngine::~TransferEngine() = default;

void TransferEngine::close() { group_->close(); }
bool TransferEngine::poll() { return group_->poll(); }
const EngineAddress& TransferEngine::address() const { return group_->address(); }
EngineStats TransferEngine::stats() const { return group_->stats(); }
int TransferEngine::event_fd() const { return group_->completions().event_fd(); }
std::vector<Completion> TransferEngine::drain() { return group_->completions().drain(); }

const std::vector<std::string>& TransferEngine::fabrics() const { return group_->fabrics(); }
const std::vector<NicInfo>& TransferEngine::nics() const { return group_->nics(); }

// --- memory ----------------------------------------------------------------------------------

Result<RegionPtr> TransferEngine::allocate(std::size_t bytes) {
  auto region = MemoryRegion::allocate(address().engine, bytes);
  if (!region) return region;
  if (auto good = group_->register_region(*region); !good) return good.error();
  return region;
}

Result<RegionPtr> TransferEngine::register_memory(void* data, std::size_t bytes) {
  auto region = MemoryRegion::wrap(address().engine, data, bytes);
  if (!region) return region;
  if (auto good = group_->register_region(*region); !good) return good.error();
  return region;
}

Result<void> TransferEngine::deregister(const RegionPtr& region) {
  return group_->deregister(region);
}

// --- peers -----------------------------------------------------------------------------------

OperationId TransferEngine::connect(const EngineAddress& target, Duration timeout) {
  const OperationId id = group_->next_operation_id();
  group_->connect(id, target, timeout);
  return id;
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

Result<void> TransferEngine::add(Submission& submission, PeerId peer, const RegionPtr& source,
                                 const MrDescriptor* destination,
                                 Result<std::vector<WireWrite>> writes, std::uint64_t bytes,
                                 const WriteOptions& options) const {
  if (!writes) return writes.error();
  if (options.nic && *options.nic >= group_->nics().size()) {
    return Error{Errc::invalid_argument, "this engine has no NIC number " +
                                             std::to_string(*options.nic) + "; it has " +
                                             std::to_string(group_->nics().size())};
  }
  const auto handle = group_->find_peer(peer);
  if (!handle) return no_peer(peer);
  if (destination) {
    if (auto good = check_destination(*handle, *destination); !good) return good.error();
  }
  const std::uint64_t count = writes->size();
  if (handle->queued_writes.fetch_add(count) + count > kMaxQueuedWrites) {
    handle->queued_writes -= count;
    return Error{Errc::backpressure, "peer " + handle->label + " has " +
                                         std::to_string(kMaxQueuedWrites) +
                                         " writes queued; wait for some to complete"};
  }
  Operation& operation = submission.parts.emplace_back();
  operation.id = submission.id;
  operation.peer = peer;
  operation.handle = handle;
  operation.source = source;
  operation.destination_key = destination ? destination->key : 0;
  operation.destination_length = destination ? destination->length : 0;
  operation.imm = options.imm;
  operation.nic = options.nic;
  operation.after = options.after;
  operation.writes = std::move(*writes);
  if (options.imm) operation.total = handle->groups ? form_groups(operation.writes) : count;
  operation.bytes = bytes;
  operation.deadline_ns = submission.deadline_ns;
  return {};
}

Result<Submitted> TransferEngine::submit(const SubmissionPtr& submission,
                                         const Result<void>& added) {
  if (!added) return give_back(*submission, added);
  Submitted submitted{.id = submission->id};
  for (const Operation& part : submission->parts) {
    submitted.writes += part.writes.size();
    submitted.immediates += part.total;
    submitted.bytes += part.bytes;
  }
  group_->submit(submission);
  return submitted;
}

Result<Scattered> TransferEngine::submit_all(const SubmissionPtr& submission,
                                             const Result<void>& added) {
  if (!added) return give_back(*submission, added);
  Scattered scattered{.id = submission->id};
  for (const Operation& part : submission->parts) {
    scattered.writes += part.writes.size();
    scattered.immediates.push_back(part.total);
    scattered.bytes += part.bytes;
  }
  group_->submit(submission);
  return scattered;
}

unsigned TransferEngine::shards_for(PeerId peer, const WriteOptions& options) const {
  const auto handle = group_->find_peer(peer);
  return handle && !options.nic ? handle->shards.load() : 1;
}

Result<Submitted> TransferEngine::write(PeerId peer, const RegionPtr& source,
                                        const MrDescriptor& destination, const SingleWrite& write,
                                        const WriteOptions& options) {
  auto writes = plan_single(write, source->size(), destination.length, shards_for(peer, options));
  const auto submission = begin(1, options);
  return submit(submission, add(*submission, peer, source, &destination, std::move(writes),
                                write.length, options));
}

Result<Submitted> TransferEngine::write_pages(PeerId peer, const RegionPtr& source,
                                              const MrDescriptor& destination,
                                              const PagedWrite& pages,
                                              const WriteOptions& options) {
  const auto submission = begin(1, options);
  return submit(submission, add(*submission, peer, source, &destination,
                                plan_pages(pages, source->size(), destination.length,
                                           group_->spare_writes().take(pages.source_pages.size())),
                                pages.source_pages.size() * pages.page_length, options));
}

Result<Submitted> TransferEngine::write_list(PeerId peer, std::span<const ListedWrite> writes,
                                             const WriteOptions& options) {
  if (writes.empty()) {
    return Error{Errc::invalid_argument, "nothing to write: the list is empty"};
  }
  const unsigned shards = shards_for(peer, options);
  auto parts = plan_list(writes, shards);
  if (!parts) return parts.error();
  const auto submission = begin(parts->size(), options);
  Result<void> added;
  for (ListedPart& part : *parts) {
    const ListedWrite& first = *part.first;
    added = add(*submission, peer, first.source, &first.destination, std::move(part.writes),
                part.bytes, options);
    if (!added) break;
  }
  return submit(submission, added);
}

Result<Submitted> TransferEngine::write_imm(PeerId peer, Imm imm, const WriteOptions& options) {
  WriteOptions counted = options;
  counted.imm = imm;
  const auto submission = begin(1, options);
  return submit(submission,
                add(*submission, peer, nullptr, nullptr, std::vector<WireWrite>(1), 0, counted));
}

Result<Scattered> TransferEngine::scatter(const RegionPtr& source,
                                          std::span<const ScatterPart> parts,
                                          const WriteOptions& options) {
  const auto submission = begin(parts.size(), options);
  Result<void> added;
  for (const ScatterPart& part : parts) {
    added =
        part.write.length == 0
            ? add(*submission, part.peer, nullptr, nullptr, std::vector<WireWrite>(1), 0, options)
            : add(*submission, part.peer, source, &part.destination,
                  plan_single(part.write, source->size(), part.destination.length,
                              shards_for(part.peer, options)),
                  part.write.length, options);
    if (!added) break;
  }
  return submit_all(submission, added);
}

Result<Scattered> TransferEngine::barrier(std::span<const PeerId> peers, Imm imm,
                                          const WriteOptions& options) {
  WriteOptions counted = options;
  counted.imm = imm;
  const auto submission = begin(peers.size(), options);
  Result<void> added;
  for (const PeerId peer : peers) {
    added = add(*submission, peer, nullptr, nullptr, std::vector<WireWrite>(1), 0, counted);
    if (!added) break;
  }
  return submit_all(submission, added);
}

void TransferEngine::wake() { group_->wake(); }

void TransferEngine::cancel(OperationId operation) { group_->cancel(operation); }

// --- counters --------------------------------------------------------------------------------

Result<Imm> TransferEngine::allocate_counter(std::optional<PeerId> writer) {
  return group_->counters().allocate(writer);
}

std::uint64_t TransferEngine::counter_value(Imm imm) const { return group_->counters().value(imm); }

Result<void> TransferEngine::expect(Imm imm, std::uint64_t total, Expect expect) {
  return group_->counters().expect(imm, total, expect);
}

Result<void> TransferEngine::subscribe(Imm imm) { return group_->counters().subscribe(imm); }

std::uint64_t TransferEngine::take_arrivals(Imm imm) {
  return group_->counters().take_arrivals(imm);
}

Result<std::vector<MrDescriptor>> TransferEngine::grant(Imm imm,
                                                        std::span<const RegionRange> ranges) {
  return group_->grant(imm, ranges);
}

void TransferEngine::release_counter(Imm imm) { group_->release_counter(imm, true); }

bool TransferEngine::begin_release_counter(Imm imm) { return group_->release_counter(imm, false); }

}  // namespace kvxfer
