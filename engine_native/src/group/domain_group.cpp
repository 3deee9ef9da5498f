#include "group/domain_group.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <fstream>

#include "clock.hpp"
#include "engine_options.hpp"
#include "random.hpp"

namespace kvxfer {
namespace {

// The interval of steps with nothing to time.
constexpr std::uint64_t kIdleTickNs = 10'000'000'000u;
// The interval at which a sleeping thread checks watched words, since a plain store does not wake
// it. It grows with the time in which nothing moved, to which a later check adds little.
constexpr std::uint64_t kWatchNs = 100'000u;
constexpr std::uint64_t kWatchMostNs = 1'000'000u;
constexpr std::uint64_t kWatchParts = 16;
// The interval at which NICs are polled whose paths are being closed.
constexpr std::uint64_t kClosingNs = 100'000u;
// The interval at which a sleeping thread checks copies that a GPU has under way.
constexpr std::uint64_t kCopiesNs = 20'000u;
// The maximum size of messages that have arrived and are not drained, in bytes.
constexpr std::size_t kMaxUnreadBytes = 64u << 20;

Error engine_closed() { return {Errc::engine_closed, "this engine was closed"}; }

Error still_open(const local::LentMemory::Loan& loan) {
  return {Errc::deadline_exceeded,
          loan.peer +
              " still has memory of a GPU open that this engine has closed; do not free it "
              "before that process has closed it too, or has ended"};
}

// Returns a text that is equal for engines that share a kernel boot and a network namespace: only
// those can meet over an abstract unix socket.
std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> space{};
  const ssize_t size = ::readlink("/proc/self/ns/net", space.data(), space.size());
  return boot + "/" +
         std::string(space.data(), static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
}

EngineAddress make_address(const EngineOptions& options, std::uint16_t port) {
  EngineAddress address;
  address.host = options.advertise.empty() ? options.host : options.advertise;
  address.port = port;
  random_bytes(address.engine.bytes.data(), address.engine.bytes.size());
  return address;
}

Identity make_identity(const EngineOptions& options, const EngineId& engine) {
  return {.cluster_key = options.cluster_key,
          .engine = engine,
          .introduction = {.name = options.name,
                           .host = host_identity(),
                           .local = options.local,
                           .tcp = options.tcp,
                           .lanes = static_cast<std::uint16_t>(options.tuning.lanes),
                           .heartbeat_ns = static_cast<std::uint64_t>(
                               options.tuning.heartbeat_interval.count())}};
}

}  // namespace

Result<std::unique_ptr<DomainGroup>> DomainGroup::open(EngineOptions options) {
  if (auto good = check_options(options); !good) return good.error();
  auto poller = Poller::create();
  if (!poller) return poller.error();
  auto completions = CompletionQueue::create(options.thread);
  if (!completions) return completions.error();
  auto acceptor = Acceptor::listen(options.host, options.port);
  if (!acceptor) return acceptor.error();
  std::unique_ptr<DomainGroup> group(new DomainGroup(
      std::move(options), std::move(*poller), std::move(*completions), std::move(*acceptor)));
  if (auto good = group->start(); !good) return good.error();
  return group;
}

DomainGroup::DomainGroup(EngineOptions options, Poller poller,
                         std::unique_ptr<CompletionQueue> completions,
                         std::unique_ptr<Acceptor> acceptor)
    : options_(std::move(options)),
      address_(make_address(options_, acceptor->port())),
      identity_(make_identity(options_, address_.engine)),
      completions_(std::move(completions)),
      counters_(*completions_),
      loop_(std::move(poller), *this),
      operations_(address_.engine, options_.tuning.path_timeout + options_.peer_timeout,
                  *completions_),
      exposed_({.engine = address_.engine,
                .fabrics = fabrics_,
                .peers = peers_,
                .background = background_,
                .gpus = gpus_,
                .counters = counters_,
                .regions = regions_,
                .completions = *completions_,
                .stats = stats_}),
      connections_(std::move(acceptor), {.options = options_,
                                         .identity = identity_,
                                         .poller = loop_.poller(),
                                         .fabrics = fabrics_,
                                         .peers = peers_,
                                         .peer_events = *this,
                                         .operations = operations_,
                                         .completions = *completions_,
                                         .stats = stats_}),
      background_(loop_.poller()) {}

Result<void> DomainGroup::start() {
  const Fabrics::Context context{
      .options = options_,
      .engine = address_.engine,
      .poller = loop_.poller(),
      .background = background_,
      .gpus = gpus_,
      .lent = lent_,
      .receive_context = {regions_, counters_, stats_, loop_.activity(), gpus_},
      .completions = *completions_,
      .events = *this,
      .local_events = connections_};
  if (auto good = fabrics_.open(context, identity_.introduction); !good) return good;
  if (auto good = connections_.start(); !good) return good;
  last_tick_ns_ = now_ns();
  return loop_.start(options_.thread, options_.tuning.spin, options_.cpus);
}

DomainGroup::~DomainGroup() { close(); }

Result<void> DomainGroup::require_open() const {
  if (auto good = require_own_process(); !good) return good;
  if (loop_.closed()) return engine_closed();
  return {};
}

// --- the loop --------------------------------------------------------------------------------

void DomainGroup::step() {
  loop_.activity() += gpus_.poll();
  fabrics_.send_owed();
  loop_.poll_sockets(fabrics_.only_sockets());
  loop_.run_commands();
  loop_.activity() += background_.finish();
  loop_.activity() += operations_.release_held();
  fabrics_.poll();
  const std::uint64_t now = now_ns();
  for (const auto& [id, peer] : peers_.all()) {
    if (peer->nics()) peer->nics()->step(now);
    if (peer->up() && peer->has_backlog()) peer->pump();
  }
  loop_.activity() += stream_waits_.poll(now);
  exposed_.reset_late_writers(now);
  bury_lost_peers();
  if (now - last_tick_ns_ >=
      static_cast<std::uint64_t>(options_.tuning.heartbeat_interval.count())) {
    tick(now);
    bury_lost_peers();
  }
  end_deregistrations(now);
}

void DomainGroup::tick(std::uint64_t now) {
  const auto interval = static_cast<std::uint64_t>(options_.tuning.heartbeat_interval.count());
  const std::uint64_t elapsed = now - std::exchange(last_tick_ns_, now);
  // While this thread had no processor, or nothing to time, no peer was late.
  const std::uint64_t stalled = elapsed > 3 * interval ? elapsed - interval : 0;
  for (const auto& [id, peer] : peers_.all()) peer->tick(now, stalled, options_.peer_timeout);
  connections_.expire(now, stalled);
  operations_.expire(now);
}

std::uint64_t DomainGroup::next_step_ns(std::uint64_t now, std::uint64_t quiet_ns) const {
  const bool timed = !peers_.all().empty() || !connections_.idle() || !deregistering_.empty();
  std::uint64_t next =
      last_tick_ns_ + (timed
                           ? static_cast<std::uint64_t>(options_.tuning.heartbeat_interval.count())
                           : kIdleTickNs);
  if (operations_.holds_any()) {
    next = std::min(next, now + std::clamp(quiet_ns / kWatchParts, kWatchNs, kWatchMostNs));
  }
  if (gpus_.busy()) next = std::min(next, now + kCopiesNs);
  return std::min({next, exposed_.next_deadline_ns(), stream_waits_.next_deadline_ns()});
}

bool DomainGroup::prepare_sleep() {
  return !background_.ready() && !operations_.may_release() && fabrics_.prepare_sleep();
}

void DomainGroup::shut_down() {
  // First, because closing a CUDA handle in the background may wait for the stream.
  stream_waits_.end_all(engine_closed());
  connections_.close();
  std::vector<PeerId> ids;
  for (const auto& [id, peer] : peers_.all()) ids.push_back(id);
  for (const PeerId id : ids) {
    peers_.find(id)->say_goodbye({});
    close_peer(id, engine_closed());
  }
  fabrics_.close_local();
  const auto awaited = [this](const auto& loan) { return !is_late(loan, now_ns()); };
  while (!peers_.closing().empty() || !background_.idle() || gpus_.busy() ||
         std::ranges::any_of(lent_.all(), awaited)) {
    if (!background_.ready()) loop_.poller().poll(kClosingNs);
    gpus_.poll();
    background_.finish();
    fabrics_.poll();
  }
  end_deregistrations(now_ns());
  for (const auto& loan : lent_.all()) {
    completions_->push({.kind = Completion::Kind::notice, .text = still_open(loan).text});
  }
  std::erase_if(deregistering_, [](const auto& answered) { return !answered.unused; });
  assert(peers_.all().empty() && lost_.empty() && deregistering_.empty());
  for (const RegionPtr& region : regions_.all()) {
    const auto closed = region->close_registrations();
    if (closed) continue;
    completions_->push({.kind = Completion::Kind::notice, .text = closed.error().text});
  }
}

EngineStats DomainGroup::stats() {
  EngineStats stats;
  const bool running = loop_.run([&] {
    stats = stats_;
    stats.peers = peers_.count_up();
  });
  return running ? stats : stats_;
}

// --- operations ------------------------------------------------------------------------------

void DomainGroup::submit(const SubmissionPtr& submission) {
  if (loop_.driven()) return operations_.begin(submission);
  if (loop_.post([this, submission] { operations_.begin(submission); })) return;
  operations_.refuse(*submission, engine_closed());
}

void DomainGroup::cancel(OperationId operation) {
  loop_.post([this, operation] { operations_.cancel(operation); });
}

void DomainGroup::wait_for_stream(const StreamWaits::Waiting& waiting) {
  if (loop_.post([this, waiting] { stream_waits_.add(waiting); })) return;
  waiting.wait->end(engine_closed());
}

void DomainGroup::mirror_counter(Imm imm, const std::shared_ptr<cuda::MirroredCount>& mirror) {
  if (loop_.post([this, imm, mirror] { stream_waits_.mirror(imm, mirror); })) return;
  mirror->end(Errc::engine_closed);
}

// --- memory ----------------------------------------------------------------------------------

Result<void> DomainGroup::register_region(const RegionPtr& region, bool require_nics) {
  if (auto good = fabrics_.register_memory(*region, require_nics, *completions_); !good) {
    return good;
  }
  regions_.insert(region);
  return {};
}

Result<void> DomainGroup::deregister(const RegionPtr& region) {
  auto unused = std::make_shared<std::promise<Result<void>>>();
  const bool posted = loop_.post([this, region, unused] {
    region->end_use();
    exposed_.take_back(region);
    fabrics_.forget_source(*region);
    deregistering_.push_back({region, unused});
    operations_.fail_reading(region);
    gpus_.after_copies([this, region] {
      for (Deregistering& waiting : deregistering_) {
        if (waiting.region == region) waiting.copied = true;
      }
    });
    end_deregistrations(now_ns());
  });
  auto unread = unused->get_future();
  posted ? loop_.await(unread) : loop_.await_end();
  auto closed = region->close_registrations();  // on the caller's thread: unpinning takes long
  gpus_.flush_nic_writes();
  if (posted && closed) return unread.get();
  return closed;
}

// Ends a deregistration once no write reads the region, no path has a window of it open, no GPU
// copies, and no peer's GPU has it open. If a peer is late, the caller gets an error; the region
// stays.
void DomainGroup::end_deregistrations(std::uint64_t now) {
  std::erase_if(deregistering_, [this, now](Deregistering& waiting) {
    const MemoryRegion& region = *waiting.region;
    if (!waiting.copied || operations_.reads(region) || exposed_.has_windows_of(region)) {
      return false;
    }
    const auto* const loan = lent_.of(region);
    if (waiting.unused && (!loan || is_late(*loan, now))) {
      waiting.unused->set_value(loan ? still_open(*loan) : Result<void>{});
      waiting.unused.reset();
    }
    return !loan;
  });
}

bool DomainGroup::is_late(const local::LentMemory::Loan& loan, std::uint64_t now) const {
  return now > loan.asked_ns + static_cast<std::uint64_t>(options_.peer_timeout.count());
}

Result<std::vector<MrDescriptor>> DomainGroup::grant(Imm imm, std::span<const RegionRange> ranges) {
  const auto grants = exposed_.make_grants(imm, ranges);
  if (!grants) return grants.error();
  if (!loop_.post([this, imm, made = *grants] { exposed_.track_grants(imm, made); })) {
    exposed_.drop_grants(*grants);
    return engine_closed();
  }
  std::vector<MrDescriptor> descriptors;
  for (const RegionPtr& grant : *grants) descriptors.push_back(grant->descriptor());
  return descriptors;
}

bool DomainGroup::release_counter(Imm imm, bool wait) {
  auto done = std::make_shared<std::promise<void>>();
  bool pending = false;
  loop_.run([&] { pending = exposed_.release_counter(imm, wait ? done : nullptr); });
  if (!pending) return true;
  if (wait) loop_.await(done->get_future());
  return wait;
}

// --- how peers come and go -------------------------------------------------------------------

void DomainGroup::connect(OperationId id, const EngineAddress& address, Duration timeout) {
  const bool posted = loop_.post([this, id, address, timeout] {
    connections_.begin(id, address, now_ns() + static_cast<std::uint64_t>(timeout.count()));
  });
  if (!posted) connections_.complete(id, engine_closed());
}

void DomainGroup::send(PeerId peer, std::string data) {
  loop_.post([this, peer, data = std::move(data)] {
    if (Peer* const found = peers_.find(peer)) found->send_message(data);
  });
}

void DomainGroup::on_up(Peer& peer) {
  peers_.publish(peer);
  completions_->push({.kind = Completion::Kind::peer_up,
                      .id = peer.initiator() ? 0u : 1u,
                      .peer = peer.id(),
                      .text = peer.session().introduction.name,
                      .data = peer.session().peer.hex(),
                      .fabric = peer.fabric()});
  for (const OperationId id : peer.waiters.take()) connections_.complete(id, peer.id());
}

void DomainGroup::on_message(Peer& peer, std::string data) {
  ++loop_.activity();
  if (completions_->waiting_bytes() > kMaxUnreadBytes) {
    return peer.lose({Errc::backpressure, "this engine does not drain its messages"});
  }
  completions_->push(
      {.kind = Completion::Kind::message, .peer = peer.id(), .data = std::move(data)});
}

void DomainGroup::on_notice(Peer& peer, std::string text) {
  completions_->push(
      {.kind = Completion::Kind::notice, .peer = peer.id(), .text = std::move(text)});
}

void DomainGroup::disconnect(PeerId peer) {
  close_and_wait(peer, {Errc::peer_lost, "this engine disconnected"}, true);
}

bool DomainGroup::fence(PeerId peer) {
  return close_and_wait(peer, {Errc::peer_lost, "this engine fenced the peer off"}, false);
}

bool DomainGroup::close_and_wait(PeerId id, const Error& why, bool say_goodbye) {
  auto closed = std::make_shared<std::promise<void>>();
  bool waits = false;
  const bool running = loop_.run([&] {
    if (Peer* const peer = peers_.find(id)) {
      if (say_goodbye) peer->say_goodbye({});
      close_peer(id, why);
      waits = true;
    }
    Peers::Closing* const closing = peers_.find_closing(id);
    if (!closing) return closed->set_value();
    closing->waiting.push_back(closed);
    waits = true;
  });
  if (running) loop_.await(closed->get_future());
  return waits;
}

void DomainGroup::on_peer_lost(Peer& peer, Error error) {
  lost_.emplace_back(peer.id(), std::move(error));
}

void DomainGroup::bury_lost_peers() {
  while (!lost_.empty()) {
    const auto lost = std::exchange(lost_, {});
    for (const auto& [id, error] : lost) close_peer(id, error);
  }
}

void DomainGroup::close_peer(PeerId id, const Error& error) {
  if (!peers_.find(id)) return;
  if (error.code == Errc::protocol_error || error.code == Errc::backpressure) {
    stats_.peers_refused.count(error.code);
  }
  Peer& peer = peers_.begin_closing(id, error);
  if (error.code == Errc::nic_lost) peer.say_goodbye(error);
  peer.close_paths([this, id] { gpus_.after_copies([this, id] { finish_closing(id); }); });
}

void DomainGroup::finish_closing(PeerId id) {
  const Peers::Closing closed = peers_.finish_closing(id);
  exposed_.forget(id);
  operations_.end_all_of(id, closed.why);
  for (const OperationId waiter : closed.peer->waiters.take()) {
    connections_.complete(waiter, closed.why);
  }
  if (closed.peer->was_up()) {
    peers_.withdraw(id);
    completions_->push({.kind = Completion::Kind::peer_down,
                        .peer = id,
                        .code = closed.why.code,
                        .text = closed.why.text});
  }
  for (const auto& waiting : closed.waiting) waiting->set_value();
}

// --- paths and NICs --------------------------------------------------------------------------

void DomainGroup::on_lost(Path& path, Error error) {
  for (const auto& [id, peer] : peers_.all()) {
    if (peer->nics() && peer->nics()->owns(path)) {
      return peer->nics()->on_path_lost(path, std::move(error));
    }
    for (const auto& known : peer->paths()) {
      if (known.get() == &path) return peer->lose(std::move(error));
    }
  }
}

void DomainGroup::on_nic_state(NicDomain& domain) {
  ++loop_.activity();
  completions_->push(
      {.kind = Completion::Kind::notice,
       .text = "NIC " + domain.info().name + (domain.usable() ? " is usable again" : " is down")});
  for (const auto& [id, peer] : peers_.all()) {
    if (peer->nics()) peer->nics()->announce_nics();
  }
}

void DomainGroup::on_window(NicPath& path, std::uint64_t grant) {
  Peer* const peer = peers_.find(path.identity().peer);
  if (peer) peer->nics()->on_window(path, grant);
}

void DomainGroup::on_credit_due(NicPath& path) {
  Peer* const peer = peers_.find(path.identity().peer);
  if (peer) peer->nics()->on_credit_due(path);
}

// Tells the writer, which would otherwise consider the count incomplete when the path is lost.
void DomainGroup::on_refused(NicPath& path, Imm imm) {
  Peer* const peer = peers_.find(path.identity().peer);
  if (peer) peer->nics()->revoke(imm, false);
}

}  // namespace kvxfer
