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

}  // namespace

Result<std::unique_ptr<TransferEngine>> TransferEngine::create(EngineOptions options) {
  auto group = DomainGroup::open(std::move(options));
  if (!group) return group.error();
  return std::unique_ptr<TransferEngine>(new TransferEngine(std::move(*group)));
}

TransferEngine::TransferEngine(std::unique_ptr<DomainGroup> group) : group_(std::move(group)) {}
TransferEngine::~TransferEngine() = default;

void TransferEngine::close() { group_->close(); }
const EngineAddress& TransferEngine::address() const { return group_->address(); }
EngineStats TransferEngine::stats() const { return group_->stats(); }
int TransferEngine::event_fd() const { return group_->completions().event_fd(); }
std::vector<Completion> TransferEngine::drain() { return group_->completions().drain(); }

// --- memory ----------------------------------------------------------------------------------

Result<RegionPtr> TransferEngine::allocate(std::size_t bytes) {
  auto region = MemoryRegion::allocate(address().engine, bytes);
  if (region) group_->regions().insert(*region);
  return region;
}

Result<RegionPtr> TransferEngine::register_memory(void* data, std::size_t bytes) {
  auto region = MemoryRegion::wrap(address().engine, data, bytes);
  if (region) group_->regions().insert(*region);
  return region;
}

void TransferEngine::deregister(const RegionPtr& region) { group_->deregister(region); }

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

Result<Submitted> TransferEngine::submit(PeerId peer, const RegionPtr& source,
                                         const MrDescriptor* destination,
                                         Result<std::vector<WireWrite>> writes,
                                         std::optional<Imm> imm, Duration timeout) {
  if (!writes) return writes.error();
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
  auto operation = std::make_shared<Operation>();
  operation->id = group_->next_operation_id();
  operation->peer = peer;
  operation->source = source;
  operation->destination_key = destination ? destination->key : 0;
  operation->imm = imm;
  operation->writes = std::move(*writes);
  for (const WireWrite& write : operation->writes) operation->bytes += write.length;
  if (timeout <= Duration::zero()) timeout = group_->options().operation_timeout;
  operation->deadline_ns = now_ns() + static_cast<std::uint64_t>(timeout.count());
  const Submitted submitted{operation->id, count, operation->bytes};
  group_->submit(operation);
  return submitted;
}

Result<Submitted> TransferEngine::write(PeerId peer, const RegionPtr& source,
                                        const MrDescriptor& destination, const SingleWrite& write,
                                        std::optional<Imm> imm, Duration timeout) {
  return submit(peer, source, &destination, plan_single(write, source->size(), destination.length),
                imm, timeout);
}

Result<Submitted> TransferEngine::write_pages(PeerId peer, const RegionPtr& source,
                                              const MrDescriptor& destination,
                                              const PagedWrite& pages, std::optional<Imm> imm,
                                              Duration timeout) {
  return submit(peer, source, &destination, plan_pages(pages, source->size(), destination.length),
                imm, timeout);
}

Result<Submitted> TransferEngine::write_imm(PeerId peer, Imm imm, Duration timeout) {
  return submit(peer, nullptr, nullptr, std::vector<WireWrite>(1), imm, timeout);
}

void TransferEngine::cancel(OperationId operation) { group_->cancel(operation); }

// --- counters --------------------------------------------------------------------------------

Result<Imm> TransferEngine::allocate_counter() { return group_->counters().allocate(); }

std::uint64_t TransferEngine::counter_value(Imm imm) const { return group_->counters().value(imm); }

Result<void> TransferEngine::expect(Imm imm, std::uint64_t total) {
  return group_->counters().expect(imm, total);
}

void TransferEngine::release_counter(Imm imm) { group_->release_counter(imm); }

}  // namespace kvxfer
