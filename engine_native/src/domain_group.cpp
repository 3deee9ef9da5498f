// The group's thread: commands in, progress, timers. Connections are in domain_group_connect.cpp,
// operations in domain_group_operations.cpp.
#include "domain_group.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>

#include "clock.hpp"
#include "patience.hpp"
#include "random.hpp"

namespace kvxfer {
namespace {

// Of the engine thread.
constexpr int kEngineNice = -10;
// With nothing to time the thread still looks around this often.
constexpr std::uint64_t kIdleTickNs = 10'000'000'000u;
// How often a sleeping thread looks at watched words, as a plain store does not wake it: the longer
// nothing moved, the less a later look adds to that.
constexpr std::uint64_t kWatchNs = 100'000u;
constexpr std::uint64_t kWatchMostNs = 1'000'000u;
constexpr std::uint64_t kWatchParts = 16;
// How often NICs are looked at whose paths are being closed.
constexpr std::uint64_t kClosingNs = 100'000u;
// Between two looks at sockets.
constexpr unsigned kStepsPerPoll = 8;
// For a stranger to prove that it knows the cluster key.
constexpr std::uint64_t kHandshakeNs = 5'000'000'000u;
// For two engines of one host to share memory; well within a connect, so that tcp can follow.
constexpr std::uint64_t kRendezvousNs = 500'000'000u;

// Equal for engines that share a kernel boot and a network namespace: only those can meet over
// an abstract unix socket.
std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> space{};
  const ssize_t size = ::readlink("/proc/self/ns/net", space.data(), space.size());
  return boot + "/" +
         std::string(space.data(), static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
}

// Keeps the thread on these processors, beside its NICs.
Result<void> pin(pthread_t thread, const std::vector<unsigned>& cpus) {
  if (cpus.empty()) return {};
  cpu_set_t set;
  CPU_ZERO(&set);
  std::string list;
  for (const unsigned cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    list += (list.empty() ? "" : ",") + std::to_string(cpu);
  }
  if (::pthread_setaffinity_np(thread, sizeof set, &set) == 0) return {};
  return Error{Errc::invalid_argument,
               "the engine thread cannot run on cpus " + list +
                   "; choose from those that this process may use (taskset -p PID)"};
}

Result<void> validate(const EngineOptions& options) {
  const auto bad = [](const std::string& what) { return Error{Errc::invalid_argument, what}; };
  if (options.cluster_key.size() < kMinClusterKeyBytes) {
    return bad("cluster_key has " + std::to_string(options.cluster_key.size()) +
               " bytes; it needs at least 16, e.g. the output of: openssl rand -hex 32");
  }
  const bool nics =
      options.verbs != FabricUse::never || options.ofi != FabricUse::never || options.more_nics;
  if (!options.local && !options.tcp && !nics) {
    return bad("no fabric is enabled; enable at least one of local, verbs, ofi and tcp");
  }
  if (options.name.size() > kMaxNameBytes) return bad("name is longer than 128 bytes");
  if (options.lanes < 1 || options.lanes > kMaxLanes) {
    return bad("lanes is " + std::to_string(options.lanes) + "; use 1 to 64");
  }
  if (options.traffic_class < 0 || options.traffic_class > 255) {
    return bad("traffic_class is " + std::to_string(options.traffic_class) + "; use 0 to 255");
  }
  if (options.gid_index < -1 || options.gid_index > 255) {
    return bad("gid_index is " + std::to_string(options.gid_index) + "; use 0 to 255, or -1");
  }
  if (options.pkey < 0 || options.pkey > 0xffff) {
    return bad("pkey is " + std::to_string(options.pkey) + "; use 1 to 65535, or 0");
  }
  if (options.path_mtu != 0 && (options.path_mtu < 256 || options.path_mtu > 4096)) {
    return bad("path_mtu is " + std::to_string(options.path_mtu) +
               "; use 256, 512, 1024, 2048 or 4096, or 0");
  }
  if (options.paths_per_nic_pair < 1 || options.paths_per_nic_pair > 8) {
    return bad("paths_per_nic_pair is " + std::to_string(options.paths_per_nic_pair) +
               "; use 1 to 8");
  }
  if (options.service_level < 0 || options.service_level > 7) {
    return bad("service_level is " + std::to_string(options.service_level) + "; use 0 to 7");
  }
  if (options.window_bytes < kMaxWriteBytes) {
    return bad("window_bytes is " + std::to_string(options.window_bytes) +
               "; it needs at least 1 MiB");
  }
  if (options.heartbeat_interval < std::chrono::milliseconds(1) ||
      options.heartbeat_interval > Duration(kMaxHeartbeatNs) ||
      options.peer_timeout < 2 * options.heartbeat_interval) {
    return bad("heartbeat_interval must be 1 ms to 60 s, and peer_timeout at least twice as long");
  }
  if (options.path_timeout < options.heartbeat_interval) {
    return bad("path_timeout must be at least heartbeat_interval, which is when it is looked at");
  }
  if (!options.thread && !options.cpus.empty()) {
    return bad("cpus says where the engine thread runs, and this engine has none; leave cpus out");
  }
  if (options.operation_timeout <= Duration::zero() || options.spin < Duration::zero()) {
    return bad("operation_timeout must be positive and spin not negative");
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<DomainGroup>> DomainGroup::open(EngineOptions options) {
  if (auto good = validate(options); !good) return good.error();
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
      completions_(std::move(completions)),
      counters_(*completions_),
      poller_(std::move(poller)),
      acceptor_(std::move(acceptor)),
      background_(poller_) {
  address_.host = options_.advertise.empty() ? options_.host : options_.advertise;
  address_.port = acceptor_->port();
  random_bytes(address_.engine.bytes.data(), address_.engine.bytes.size());
  identity_ = {.cluster_key = options_.cluster_key,
               .engine = address_.engine,
               .introduction = {.name = options_.name,
                                .host = host_identity(),
                                .local = options_.local,
                                .tcp = options_.tcp,
                                .lanes = static_cast<std::uint16_t>(options_.lanes),
                                .heartbeat_ns = static_cast<std::uint64_t>(
                                    options_.heartbeat_interval.count())}};
}

Result<void> DomainGroup::start() {
  const ReceiveContext receive_context{regions_, counters_, stats_, activity_};
  if (options_.local) {
    auto domain = local::LocalDomain::open(address_.engine, poller_, receive_context, *this, *this);
    if (!domain && !options_.tcp) return domain.error();
    if (domain) {
      local_ = std::move(*domain);
    } else {
      identity_.introduction.local = false;
      completions_->push(
          {.kind = Completion::Kind::notice,
           .text = "the local fabric is not available here, tcp is used: " + domain.error().text});
    }
  }
  if (auto good = open_nics(receive_context); !good) return good;
  for (unsigned lane = 0; lane < options_.lanes && options_.tcp; ++lane) {
    PathEvents& events = *this;
    const std::size_t window =
        std::max<std::size_t>(options_.window_bytes / options_.lanes, kMaxWriteBytes);
    lanes_.push_back(std::make_unique<tcp::TcpDomain>(poller_, receive_context, events, window));
  }
  if (local_) fabrics_.emplace_back(local_->fabric());
  for (const auto& nic : nics_) {
    if (fabrics_.empty() || fabrics_.back() != nic->fabric()) fabrics_.emplace_back(nic->fabric());
  }
  if (!lanes_.empty()) fabrics_.emplace_back(lanes_.front()->fabric());
  if (auto good = acceptor_->start(identity_, poller_, *this); !good) return good;
  if (!options_.thread) {
    last_tick_ns_ = now_ns();
    driven_ = true;
    return {};
  }
  thread_ = std::jthread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), kEngineThreadName);
  return pin(thread_.native_handle(), options_.cpus);
}

DomainGroup::~DomainGroup() { close(); }

void DomainGroup::close() {
  if (!options_.thread) {
    if (std::exchange(driven_, false)) shut_down();
    return;
  }
  post([this] { stopping_ = true; });
  if (thread_.joinable()) ended_.wait();
}

bool DomainGroup::poll() {
  if (!driven_) return false;
  const std::uint64_t before = activity_;
  step();
  return activity_ != before;
}

// --- commands --------------------------------------------------------------------------------

bool DomainGroup::post(Command command) {
  {
    const std::lock_guard lock(commands_mutex_);
    if (closed_) return false;
    commands_.push_back(std::move(command));
    commanded_.store(true, std::memory_order_release);
  }
  // Pairs with the store in may_sleep(): either this sees the sleep or that sees the command.
  if (sleeping_.load(std::memory_order_seq_cst)) poller_.wake();
  return true;
}

bool DomainGroup::run_on_engine_thread(const Command& command) {
  if (driven_) {
    run_commands();  // that came before
    command();
    return true;
  }
  // Shared: the caller may be gone while the promise is still being fulfilled.
  auto done = std::make_shared<std::promise<void>>();
  const bool posted = post([command, done] {
    command();
    done->set_value();
  });
  posted ? done->get_future().wait() : ended_.wait();
  return posted;
}

void DomainGroup::await(const std::future<void>& done) {
  while (driven_ && done.wait_for(Duration::zero()) != std::future_status::ready) step();
  done.wait();
}

void DomainGroup::run_commands() {
  if (!commanded_.load(std::memory_order_acquire)) return;
  std::vector<Command> commands;
  {
    const std::lock_guard lock(commands_mutex_);
    commands.swap(commands_);
    commanded_.store(false, std::memory_order_relaxed);
  }
  for (const Command& command : commands) command();
  activity_ += commands.size();
}

EngineStats DomainGroup::stats() {
  EngineStats stats;
  const bool running = run_on_engine_thread([&] {
    stats = stats_;
    stats.peers = static_cast<std::uint64_t>(std::count_if(
        peers_.begin(), peers_.end(), [](const auto& entry) { return entry.second->up(); }));
  });
  return running ? stats : stats_;
}

// --- the loop --------------------------------------------------------------------------------

void DomainGroup::run() {
  // Before threads that compute, where that is permitted: peers take its silence for death.
  ::setpriority(PRIO_PROCESS, 0, kEngineNice);  // on Linux, of this thread alone
  last_tick_ns_ = now_ns();
  std::uint64_t last_progress = last_tick_ns_;
  const auto spin = static_cast<std::uint64_t>(options_.spin.count());
  while (!stopping_) {
    const std::uint64_t before = activity_;
    step();
    const std::uint64_t now = now_ns();
    if (activity_ != before) last_progress = now;
    if (now - last_progress < spin) {
      // The scheduler likes to put this thread where its peer is copying: do not take that core.
      if (activity_ == before) ::sched_yield();
      continue;
    }
    const bool timed =
        !peers_.empty() || !dialers_.empty() || !acceptor_->idle() || (local_ && !local_->idle());
    std::uint64_t next_tick =
        last_tick_ns_ +
        (timed ? static_cast<std::uint64_t>(options_.heartbeat_interval.count()) : kIdleTickNs);
    if (!held_.empty()) {
      next_tick = std::min(
          next_tick, now + std::clamp((now - last_progress) / kWatchParts, kWatchNs, kWatchMostNs));
    }
    for (const auto& each : revocations_) next_tick = std::min(next_tick, each.deadline_ns);
    if (next_tick > now && may_sleep()) poller_.poll(next_tick - now);
    sleeping_.store(false, std::memory_order_relaxed);
    if (local_) local_->finish_sleep();
    for (const auto& nic : nics_) nic->finish_sleep();
  }
  shut_down();
}

bool DomainGroup::may_sleep() {
  sleeping_.store(true, std::memory_order_seq_cst);
  {
    const std::lock_guard lock(commands_mutex_);
    if (!commands_.empty()) return false;
  }
  if (background_.ready()) return false;
  const auto ready = [](const OperationPtr& operation) { return !operation->held(); };
  if (std::any_of(held_.begin(), held_.end(), ready)) return false;
  if (local_ && !local_->prepare_sleep()) return false;
  if (!std::all_of(lanes_.begin(), lanes_.end(),
                   [](const auto& lane) { return lane->prepare_sleep(); })) {
    return false;
  }
  return std::all_of(nics_.begin(), nics_.end(),
                     [](const auto& nic) { return nic->prepare_sleep(); });
}

void DomainGroup::step() {
  for (const auto& lane : lanes_) lane->poll();
  // A look at sockets is a system call: not at every step while something moves without it, nor
  // where the caller polls for a latency below that.
  const bool moving = std::exchange(activity_before_, activity_) != activity_;
  const bool only_sockets = !local_ && nics_.empty();
  if (only_sockets || (!moving && !driven_) || ++steps_ >= kStepsPerPoll) {
    steps_ = 0;
    poller_.poll(0);
  }
  run_commands();
  activity_ += background_.finish();
  if (!held_.empty()) release_held();
  if (local_) local_->poll();
  for (const auto& nic : nics_) nic->poll();
  const std::uint64_t now = now_ns();
  for (const auto& [id, peer] : peers_) {
    if (peer->nics()) peer->nics()->step(now);
    if (peer->up() && peer->has_backlog()) peer->pump();
  }
  if (!revocations_.empty()) reset_late_writers(now);
  bury_lost_peers();
  if (now - last_tick_ns_ >= static_cast<std::uint64_t>(options_.heartbeat_interval.count())) {
    tick(now);
    bury_lost_peers();
  }
  if (!deregistering_.empty()) end_deregistrations();
}

void DomainGroup::tick(std::uint64_t now) {
  const auto interval = static_cast<std::uint64_t>(options_.heartbeat_interval.count());
  const std::uint64_t elapsed = now - std::exchange(last_tick_ns_, now);
  // While this thread had no processor, or nothing to time, nobody was late.
  const std::uint64_t stalled = elapsed > 3 * interval ? elapsed - interval : 0;
  for (const auto& [id, peer] : peers_) peer->tick(now, stalled, options_.peer_timeout);
  expire_connects(now);
  std::erase_if(lane_dialers_, [&](const auto& dialer) {
    return dialer->ended() || !peers_.contains(dialer->peer);
  });
  acceptor_->expire(now - std::min(now, kHandshakeNs + stalled));
  if (local_) {
    const bool only = lanes_.empty() && nics_.empty();
    local_->expire(now - std::min(now, (only ? kHandshakeNs : kRendezvousNs) + stalled));
  }
  expire_operations(now);
}

void DomainGroup::shut_down() {
  {
    const std::lock_guard lock(commands_mutex_);
    closed_ = true;
  }
  run_commands();
  for (const auto& dialer : dialers_) {
    if (!dialer->ended()) {
      on_dialed(*dialer, Error{Errc::engine_closed, "this engine is being closed"});
    }
  }
  std::vector<PeerId> ids;
  ids.reserve(peers_.size());
  for (const auto& [id, peer] : peers_) ids.push_back(id);
  for (const PeerId id : ids) {
    peers_.at(id)->say_goodbye({});
    close_peer(id, {Errc::engine_closed, "this engine was closed"});
  }
  lane_dialers_.clear();
  dialers_.clear();
  acceptor_.reset();
  local_.reset();
  while (!closing_.empty() || !background_.idle()) {
    if (!background_.ready()) poller_.poll(kClosingNs);
    background_.finish();
    for (const auto& nic : nics_) nic->poll();
  }
  end_deregistrations();
  for (const RegionPtr& region : regions_.all()) {
    const auto closed = region->close_registrations();
    if (closed) continue;
    completions_->push({.kind = Completion::Kind::notice, .text = closed.error().text});
  }
  ending_.set_value();
}

}  // namespace kvxfer
