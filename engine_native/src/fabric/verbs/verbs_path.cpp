#include "fabric/verbs/verbs_path.hpp"

#include <arpa/inet.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <future>

#include "clock.hpp"
#include "error_text.hpp"
#include "fabric/verbs/completion_error.hpp"
#include "fabric/verbs/gid_choice.hpp"
#include "fabric/verbs/verbs_registration.hpp"
#include "random.hpp"

namespace kvxfer::verbs {
namespace {

// wr_id of a write that completes: its batch's sequence, and how many requests the batch has.
constexpr unsigned kCountBits = 16;
constexpr std::uint64_t kCountMask = (1u << kCountBits) - 1;
// wr_id of the request that marks the end of a queue pair.
constexpr std::uint64_t kEndId = UINT64_MAX - 1;
static_assert(kEndId != kReceiveId);
// Flushing takes microseconds; a NIC that is dying may never say that it is done.
constexpr std::uint64_t kStopNs = 100'000'000u;
// For a network to answer. Where it does not, the engine thread is not kept for long again.
constexpr auto kLookup = std::chrono::milliseconds(200);
constexpr auto kFurtherLookup = std::chrono::milliseconds(10);

std::uint32_t random_packet_sequence() {
  std::uint32_t sequence = 0;
  random_bytes(&sequence, sizeof sequence);
  return sequence & 0xffffff;
}

}  // namespace

Result<std::unique_ptr<NicPath>> VerbsPath::open(NicPathIdentity identity, VerbsNic& nic) {
  const auto share = NicQueues::take_share(nic.queues, nic.device, nic.context.poller);
  if (!share) return share.error();
  auto pair = QueuePair::create(nic.device, nic.port, share->of->completions(),
                                share->of->receives(), share->share.sends);
  if (!pair) {
    share->of->give_back(share->share);
    return pair.error();
  }
  return std::unique_ptr<NicPath>(
      new VerbsPath(std::move(identity), *share, std::move(*pair), nic));
}

VerbsPath::VerbsPath(NicPathIdentity identity, NicQueues::Share share,
                     std::shared_ptr<QueuePair> pair, VerbsNic& nic)
    : NicPath(std::move(identity), share.share.receives, nic.load, nic.context.receive_context,
              nic.context.events),
      nic_(nic),
      queues_(*share.of),
      share_(share.share),
      pair_(std::move(pair)),
      port_(nic.port),
      ours_{.queue_pair = pair_->number(),
            .packet_sequence = random_packet_sequence(),
            .imm_window = share_.receives,
            .lid = port_.lid,
            .mtu = port_.mtu,
            .link_layer = port_.link_layer,
            .gid = port_.gid},
      windows_(nic.device, pair_->get()),
      sends_left_(share_.sends) {
  queues_.add(pair_->number(), *this);
}

VerbsPath::~VerbsPath() { shut(); }

Result<void> VerbsPath::connect(std::string_view endpoint) {
  const auto theirs = PathEndpoint::decode(endpoint);
  if (!theirs || theirs->link_layer != port_.link_layer) {
    return Error{Errc::protocol_error, "peer " + identity_.label + " sent a queue pair that NIC " +
                                           nic_.device->name() + " cannot be joined to"};
  }
  const auto failed = [&](const std::string& why) {
    return Error{Errc::nic_lost, "NIC " + nic_.device->name() + " (" + gid_text(port_.gid) +
                                     ") has no way to " + gid_text(theirs->gid) + " of peer " +
                                     identity_.label + ": " + why +
                                     "; check the network between the NICs"};
  };
  const auto patience = nic_.lookups.pending() ? kFurtherLookup : kLookup;
  const EngineOptions& options = nic_.context.options;
  const ibv_ah_attr way =
      address_vector(port_, *theirs,
                     {.traffic_class = static_cast<std::uint8_t>(options.traffic_class),
                      .service_level = static_cast<std::uint8_t>(options.service_level)});
  std::future<int> joined = nic_.lookups.run([pair = pair_, way, ours = ours_, theirs = *theirs] {
    return pair->join(way, ours, theirs);
  });
  joining_ = joined.wait_for(patience) != std::future_status::ready;
  if (joining_) return failed("its hardware address is not known yet");
  int error = joined.get();
  if (error == 0) error = pair_->start(ours_);
  if (error != 0) return failed(errno_text(error));
  set_peer_imm_window(theirs->imm_window);
  return {};
}

// --- writing ---------------------------------------------------------------------------------

std::size_t VerbsPath::post(const OperationPtr& operation, const WriteRange& writes) {
  const std::size_t count =
      batch_limit(operation, writes, std::min<std::size_t>(sends_left_, NicQueues::kMaxChain));
  if (count == 0 || lost()) return 0;
  const bool counted = operation->imm && writes.counted;
  static constexpr RemoteKey kNoMemory;
  const RemoteKey& key = operation->bytes > 0 ? remote_key(*operation) : kNoMemory;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const WireWrite& write = operation->writes[writes.first + i];
    write_request(i, *operation, write, key, counted);
    bytes += write.length;
  }
  const Batch& batch = add_batch(operation, {writes.first, count, writes.counted}, bytes);
  ibv_send_wr& last = queues_.chain[count - 1];
  last.next = nullptr;
  last.send_flags |= IBV_SEND_SIGNALED;
  last.wr_id = batch.sequence << kCountBits | count;
  sends_left_ -= static_cast<std::uint32_t>(count);
  ibv_send_wr* refused = nullptr;
  // Those before the refused one are under way: closing the path tells which of them arrived.
  if (const int error = ibv_post_send(pair_->get(), queues_.chain.data(), &refused)) {
    on_failed("this NIC refused a write: " + errno_text(error));
  }
  return count;
}

void VerbsPath::write_request(std::size_t at, const Operation& operation, const WireWrite& write,
                              const RemoteKey& key, bool counted) {
  ibv_send_wr& request = queues_.chain[at];
  ibv_sge& piece = queues_.pieces[at];
  request.wr_id = 0;
  request.next = &request + 1;
  request.opcode = counted ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
  request.imm_data = counted ? htonl(*operation.imm) : 0;
  request.send_flags = 0;
  request.sg_list = &piece;
  request.num_sge = 0;
  request.wr.rdma = {};
  if (write.length == 0) return;
  const auto& source = static_cast<const VerbsRegistration&>(
      *operation.source->registration(identity_.nic));  // our own: it has our number
  piece = {.addr = reinterpret_cast<std::uint64_t>(operation.source->data() + write.source),
           .length = write.length,
           .lkey = source.local_key()};
  request.num_sge = 1;
  request.wr.rdma = {.remote_addr = key.address + write.destination,
                     .rkey = static_cast<std::uint32_t>(key.rkey)};
  if (write.length <= pair_->max_inline()) request.send_flags = IBV_SEND_INLINE;
}

// --- grants ----------------------------------------------------------------------------------

bool VerbsPath::open_window(const MemoryRegion& grant) {
  auto* const registration =
      static_cast<VerbsRegistration*>(grant.granted()->of->registration(identity_.nic));
  ibv_mr* const region = registration ? registration->get() : nullptr;
  const WindowRange range{.region = region,
                          .address = reinterpret_cast<std::uint64_t>(grant.data()),
                          .length = grant.size()};
  if (!region || !windows_.open(grant.key(), range)) return false;
  post_windows();
  return true;
}

bool VerbsPath::has_windows_of(const MemoryRegion& region) const {
  auto* const registration = static_cast<VerbsRegistration*>(region.registration(identity_.nic));
  return registration && windows_.any_of(registration->get());
}

void VerbsPath::post_windows() {
  if (const int error = windows_.post()) {
    on_failed("this NIC refused a memory window: " + errno_text(error));
  }
}

// --- completions -----------------------------------------------------------------------------

void VerbsPath::on_sent(std::uint64_t request) {
  if (request == kEndId) {
    stopped_ = true;
    return;
  }
  if ((request & PathWindows::kRequest) != 0) {
    const auto opened = windows_.on_done(request);
    if (lost() || stopping_) return;
    if (opened) events_.on_window(*this, *opened);
    return post_windows();
  }
  sends_left_ += static_cast<std::uint32_t>(request & kCountMask);
  finish_through(request >> kCountBits);
}

void VerbsPath::on_failed(const ibv_wc& completion) {
  if (completion.wr_id == kEndId) stopped_ = true;
  if (stopping_ || lost()) return;
  // Flushed work is not the cause; the NIC may have told that already.
  if (completion.status == IBV_WC_WR_FLUSH_ERR) nic_.events->take();
  on_failed(cause_of(completion, nic_.device->library()));
}

void VerbsPath::on_failed(const std::string& cause) {
  lose({Errc::nic_lost,
        "NIC " + nic_.device->name() + " lost its path to peer " + identity_.label + ": " + cause});
}

// --- the end ---------------------------------------------------------------------------------

void VerbsPath::shut() {
  if (!pair_) return;
  stopping_ = true;
  if (pair_->started() && !nic_.broken) stop();
  windows_.free_all();
  // One that is being joined has placed nothing and never will; it is destroyed when that ends.
  if (!joining_) pair_->destroy();
  // Some drivers drop what a destroyed queue pair left in the completion queue, which is why stop()
  // takes it first. Others leave it there: it is taken here, while the number is still ours, so
  // that it is never taken for that of a later queue pair with the same number.
  queues_.drain();
  queues_.remove(pair_->number());
  queues_.give_back(share_);
  pair_.reset();
}

// Requests complete in order, also those that are flushed: behind the last one nothing comes.
// What the peer sent had completed before, because the queue pair takes nothing once it is stopped.
void VerbsPath::stop() {
  pair_->stop();
  ibv_send_wr end{.wr_id = kEndId, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED};
  ibv_send_wr* refused = nullptr;
  if (ibv_post_send(pair_->get(), &end, &refused) != 0) return;
  const std::uint64_t deadline = now_ns() + kStopNs;
  while (!stopped_ && now_ns() < deadline) {
    if (queues_.poll() == 0) ::sched_yield();
  }
}

}  // namespace kvxfer::verbs
