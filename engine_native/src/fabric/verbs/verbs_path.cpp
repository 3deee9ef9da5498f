#include "fabric/verbs/verbs_path.hpp"

#include <arpa/inet.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "clock.hpp"
#include "error_text.hpp"
#include "fabric/verbs/gid_choice.hpp"
#include "fabric/verbs/receive_queue.hpp"
#include "fabric/verbs/verbs_registration.hpp"
#include "random.hpp"

namespace kvxfer::verbs {
namespace {

// The wr_id of a signalled write: the sequence of its batch, and the number of requests in the
// batch.
constexpr unsigned kCountBits = 16;
constexpr std::uint64_t kCountMask = (1u << kCountBits) - 1;
// The wr_id of the request that marks the end of a queue pair.
constexpr std::uint64_t kEndId = UINT64_MAX - 1;
static_assert(kEndId != kReceiveId);
// Flushing takes microseconds; a failing NIC may never report that it is done.
constexpr std::uint64_t kStopNs = 100'000'000u;
// Joining a queue pair asks the kernel for the hardware address of the peer's NIC. If it is
// unknown, the kernel asks the network, and waits a second or more if nothing answers.
constexpr std::uint64_t kLookupNs = 200'000'000u;

std::uint32_t random_packet_sequence() {
  std::uint32_t sequence = 0;
  random_bytes(&sequence, sizeof sequence);
  return sequence & 0xffffff;
}

// Returns the cause, to be read after the name of the peer: "its NIC does not answer …".
std::string cause_of(const ibv_wc& completion, const VerbsLibrary& library) {
  if (completion.wr_id == kReceiveId && completion.status == IBV_WC_REM_ACCESS_ERR) {
    return "this NIC refused one of its writes (remote access error): the memory region was "
           "deregistered here, or the key is wrong";
  }
  switch (completion.status) {
    case IBV_WC_RETRY_EXC_ERR:
      return "its NIC does not answer (transport retries exceeded): the process or host is gone, "
             "or the network between the NICs is broken";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "its NIC had no receive ready for an immediate (receiver-not-ready retries exceeded)";
    case IBV_WC_REM_ACCESS_ERR:
      return "its NIC refused a write (remote access error): the memory region was deregistered "
             "there, or the key is wrong";
    case IBV_WC_REM_INV_REQ_ERR:
      return "its NIC found a write invalid (remote invalid request)";
    case IBV_WC_REM_OP_ERR:
      return "its NIC could not carry a write out (remote operation error)";
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return "this NIC may not read the source (local protection error): its memory was unmapped "
             "while it was registered";
    case IBV_WC_WR_FLUSH_ERR:
      return "the queue pair failed (work request flushed)";
    default:
      return std::string("work completion error: ") + library.wc_status_str(completion.status);
  }
}

}  // namespace

void VerbsPath::open(NicPathIdentity identity, VerbsNic& nic, NicDomain::Opened then) {
  using Made = Result<std::shared_ptr<QueuePair>>;
  const auto make = [&nic, identity = std::move(identity),
                     then = std::move(then)](const Result<NicQueues::Share>& taken) {
    if (!taken) return then(taken.error());
    const NicQueues::Share share = *taken;
    const auto on_made = [&nic, identity, then, share, port = nic.port](Made pair) {
      // Takes completions of an earlier queue pair with the same number, so that they do not count
      // here.
      share.of->drain();
      if (pair && nic.usable()) {
        return then(
            std::unique_ptr<NicPath>(new VerbsPath(identity, share, port, std::move(*pair), nic)));
      }
      share.of->give_back(share.share);
      if (!pair) return then(pair.error());
      nic.context.background.run([pair = *pair] { pair->destroy(); }, [] {});
      then(nic.down());
    };
    nic.context.background.run<Made>(
        [device = nic.device, port = nic.port, share] {
          return QueuePair::create(device, port, share.of->completions(), share.of->receives(),
                                   share.share.sends);
        },
        on_made);
  };
  NicQueues::take_share(nic, make);
}

VerbsPath::VerbsPath(NicPathIdentity identity, NicQueues::Share share, const Port& port,
                     std::shared_ptr<QueuePair> pair, VerbsNic& nic)
    : NicPath(std::move(identity), share.share.receives, nic.load, nic.context.receive_context,
              nic.context.events),
      nic_(nic),
      queues_(*share.of),
      share_(share.share),
      pair_(std::move(pair)),
      port_(port),
      ours_{.queue_pair = pair_->number(),
            .packet_sequence = random_packet_sequence(),
            .imm_window = share_.receives,
            .lid = port_.lid,
            .mtu = port_.mtu,
            .link_layer = port_.link_layer,
            .gid = port_.gid},
      windows_(pair_->get()),
      sends_left_(share_.sends) {
  queues_.add(pair_->number(), *this);
}

VerbsPath::~VerbsPath() = default;

// --- set-up ----------------------------------------------------------------------------------

void VerbsPath::connect(std::string_view endpoint, Connected then) {
  thread_.check("VerbsPath");
  const auto theirs = PathEndpoint::decode(endpoint);
  if (!theirs || theirs->link_layer != port_.link_layer) {
    return then(Error{Errc::protocol_error, "peer " + identity_.label +
                                                " sent a queue pair that NIC " +
                                                nic_.device->name() + " cannot be joined to"});
  }
  then_connected_ = std::move(then);
  their_gid_ = theirs->gid;
  const EngineOptions& options = nic_.context.options;
  const ibv_ah_attr way =
      address_vector(port_, *theirs,
                     {.traffic_class = static_cast<std::uint8_t>(options.traffic_class),
                      .service_level = static_cast<std::uint8_t>(options.tuning.service_level)});
  wait(State::joining, kLookupNs);
  nic_.context.background.run<int>(
      [pair = pair_, way, ours = ours_, theirs = *theirs] { return pair->join(way, ours, theirs); },
      [this, alive = std::weak_ptr(alive_), theirs = *theirs](int error) {
        if (!alive.expired() && state_ == State::joining) on_joined(error, theirs);
      });
}

// Starts the queue pair in a separate call: shut() does not wait for joining, and a queue pair that
// is started after shut() would place writes.
void VerbsPath::on_joined(int error, const PathEndpoint& theirs) {
  leave(State::starting);
  if (error != 0) return no_way(errno_text(error));
  // shut() waits for this call.
  nic_.context.background.fence<int>([pair = pair_, ours = ours_] { return pair->start(ours); },
                                     [this, theirs](int refused) { on_started(refused, theirs); });
}

void VerbsPath::on_started(int error, const PathEndpoint& theirs) {
  state_ = State::connected;
  if (stopping()) return stop();
  if (error != 0) return no_way(errno_text(error));
  set_peer_imm_window(theirs.imm_window);
  std::exchange(then_connected_, nullptr)({});
}

void VerbsPath::no_way(const std::string& why) {
  if (state_ != State::connected) leave(State::made);
  std::exchange(then_connected_, nullptr)(Error{
      Errc::nic_lost, "NIC " + nic_.device->name() + " (" + gid_text(port_.gid) +
                          ") has no way to " + gid_text(their_gid_) + " of peer " +
                          identity_.label + ": " + why + "; check the network between the NICs"});
}

void VerbsPath::wait(State state, std::uint64_t ns) {
  state_ = state;
  deadline_ns_ = now_ns() + ns;
  nic_.waiting.push_back(this);
}

void VerbsPath::leave(State next) {
  state_ = next;
  std::erase(nic_.waiting, this);
}

void VerbsPath::step(std::uint64_t now) {
  thread_.check("VerbsPath");
  if (state_ == State::joining && now > deadline_ns_) {
    no_way("its hardware address is not known yet");
  } else if (state_ == State::stopping && (stopped_ || now > deadline_ns_)) {
    destroy();
  }
}

// --- writing ---------------------------------------------------------------------------------

std::size_t VerbsPath::post(const OperationPtr& operation, const WriteRange& writes) {
  thread_.check("VerbsPath");
  const std::size_t count =
      batch_limit(operation, writes, std::min<std::size_t>(sends_left_, NicQueues::kMaxChain));
  if (count == 0 || lost() || stopping()) return 0;
  const bool counted = operation->imm && writes.counted;
  static constexpr RemoteKey kNoMemory;
  const RemoteKey& key = operation->bytes > 0 ? remote_key(*operation) : kNoMemory;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const WireWrite& write = operation->writes[writes.first + i];
    write_request(i, *operation, write, key, counted && write.grouped == 0);
    bytes += write.length;
  }
  const Batch& batch = add_batch(operation, {writes.first, count, writes.counted}, bytes);
  ibv_send_wr& last = queues_.chain[count - 1];
  last.next = nullptr;
  last.send_flags |= IBV_SEND_SIGNALED;
  last.wr_id = batch.sequence << kCountBits | count;
  sends_left_ -= static_cast<std::uint32_t>(count);
  ibv_send_wr* refused = nullptr;
  // Requests before the refused one are under way; closing the path shows which of them arrived.
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
      *operation.source->registration(identity_.nic));  // made by our NIC of this number
  piece = {.addr = operation.source->address() + write.source,
           .length = write.length,
           .lkey = source.local_key()};
  request.num_sge = 1;
  request.wr.rdma = {.remote_addr = key.address + write.destination,
                     .rkey = static_cast<std::uint32_t>(key.rkey)};
  // The processor reads inlined bytes.
  const bool inlined = write.length <= pair_->max_inline() && operation.source->host();
  if (inlined) request.send_flags = IBV_SEND_INLINE;
}

// --- grants ----------------------------------------------------------------------------------

bool VerbsPath::open_window(const MemoryRegion& grant) {
  auto* const registration =
      static_cast<VerbsRegistration*>(grant.granted()->of->registration(identity_.nic));
  const bool takes = registration && registration->takes_windows();
  ibv_mr* const region = takes ? registration->get() : nullptr;
  const WindowRange range{.region = region, .address = grant.address(), .length = grant.size()};
  if (!region) return false;
  windows_.open(grant.key(), range);
  make_windows();
  post_windows();
  return true;
}

void VerbsPath::make_windows() {
  const std::size_t wanted = windows_.unmade();
  if (wanted == 0 || std::exchange(making_windows_, true)) return;
  using Made = std::vector<MemoryWindow>;
  nic_.context.background.run<Made>(
      [device = nic_.device, wanted] { return MemoryWindow::make(device, wanted); },
      [this, alive = std::weak_ptr(alive_), wanted,
       &background = nic_.context.background](Made made) {
        if (alive.expired() || stopping()) {
          const auto unwanted = std::make_shared<Made>(std::move(made));
          return background.run([unwanted] { unwanted->clear(); }, [] {});
        }
        making_windows_ = false;
        // The NIC has no window left for these.
        for (const std::uint64_t grant : windows_.add(std::move(made), wanted)) {
          events_.on_window(*this, grant);
        }
        make_windows();
        post_windows();
      });
}

bool VerbsPath::has_windows_of(const MemoryRegion& region) const {
  auto* const registration = static_cast<VerbsRegistration*>(region.registration(identity_.nic));
  return registration && windows_.any_of(registration->get());
}

void VerbsPath::post_windows() {
  if (stopping()) return;
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
    if (lost() || stopping()) return;
    if (opened) events_.on_window(*this, *opened);
    return post_windows();
  }
  sends_left_ += static_cast<std::uint32_t>(request & kCountMask);
  finish_through(request >> kCountBits);
}

void VerbsPath::on_failed(const ibv_wc& completion) {
  if (completion.wr_id == kEndId) stopped_ = true;
  if (stopping() || lost()) return;
  // Flushed work is not the cause; the NIC may have reported the cause as an event.
  if (completion.status == IBV_WC_WR_FLUSH_ERR) nic_.events->take();
  on_failed(cause_of(completion, nic_.device->library()));
}

void VerbsPath::on_failed(const std::string& cause) {
  lose({Errc::nic_lost,
        "NIC " + nic_.device->name() + " lost its path to peer " + identity_.label + ": " + cause});
}

// --- the end ---------------------------------------------------------------------------------

void VerbsPath::shut(std::function<void()> then) {
  thread_.check("VerbsPath");
  then_shut_ = std::move(then);
  then_connected_ = nullptr;
  if (state_ == State::connected) return stop();
  if (state_ == State::starting) return;  // on_started() continues
  // The queue pair has placed nothing and never will. If it is being joined, it is destroyed after
  // that.
  leave(State::gone);
  nic_.context.background.run([pair = std::move(pair_)] {}, [] {});
  finish();
}

// Stops the queue pair and posts a last request. Requests complete in order, even if flushed, so
// nothing completes after it. Writes of the peer have completed before, because a stopped queue
// pair takes none.
void VerbsPath::stop() {
  if (!pair_->started() || nic_.broken) return destroy();
  nic_.context.background.fence<bool>(
      [pair = pair_] {
        pair->stop();
        ibv_send_wr end{
            .wr_id = kEndId, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED};
        ibv_send_wr* refused = nullptr;
        return ibv_post_send(pair->get(), &end, &refused) == 0;
      },
      [this](bool marked) { marked ? wait(State::stopping, kStopNs) : destroy(); });
}

void VerbsPath::destroy() {
  leave(State::gone);
  const auto windows = std::make_shared<std::vector<MemoryWindow>>(windows_.take_all());
  nic_.context.background.fence(
      [pair = pair_, windows] {
        windows->clear();
        pair->destroy();
      },
      [this] {
        // Some drivers drop the completions of a destroyed queue pair, so stop() takes them first.
        // Others leave them in the completion queue: they are taken here, while the number is still
        // ours, so that they never count for a later queue pair with that number.
        queues_.drain();
        finish();
      });
}

void VerbsPath::finish() {
  queues_.remove(ours_.queue_pair, *this);
  queues_.give_back(share_);
  pair_.reset();
  end(std::exchange(then_shut_, nullptr));
}

}  // namespace kvxfer::verbs
