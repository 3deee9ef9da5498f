#include "fabric/local/local_domain.hpp"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "error_text.hpp"
#include "fabric/local/unix_socket.hpp"
#include "random.hpp"

namespace kvxfer::local {
namespace {

// The most half-open rendezvous that are kept; one more closes the oldest of a stranger.
constexpr std::size_t kMaxRendezvous = 256;

}  // namespace

Result<std::unique_ptr<LocalDomain>> LocalDomain::open(const EngineId& engine, Poller& poller,
                                                       ReceiveContext receive_context,
                                                       PathEvents& path_events, LocalEvents& events,
                                                       GpuContext gpus) {
  auto listener = listen_unix(socket_name(engine));
  if (!listener) return listener.error();
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake) {
    return Error{Errc::out_of_memory, std::string("cannot create an eventfd: ") + errno_text() +
                                          "; raise the open files limit"};
  }
  std::unique_ptr<LocalDomain> domain(new LocalDomain(std::move(*listener), std::move(wake), poller,
                                                      receive_context, path_events, events,
                                                      std::move(gpus)));
  if (auto good = poller.add(domain->wake_.get(), EPOLLIN, *domain); !good) return good.error();
  LocalDomain& self = *domain;
  auto listening =
      self.listener_.start(poller, [&self](UniqueFd socket) { self.accept(std::move(socket)); });
  if (!listening) return listening.error();
  return domain;
}

LocalDomain::LocalDomain(UniqueFd listener, UniqueFd wake, Poller& poller,
                         ReceiveContext receive_context, PathEvents& path_events,
                         LocalEvents& events, GpuContext gpus)
    : listener_(std::move(listener)),
      wake_(std::move(wake)),
      poller_(poller),
      receive_context_(receive_context),
      path_events_(path_events),
      events_(events),
      gpus_(std::move(gpus)) {
  host_.wake_fd = wake_.get();
  random_bytes(host_.probe.data(), host_.probe.size());
}

LocalDomain::~LocalDomain() { poller_.remove(wake_.get(), *this); }

void LocalDomain::poll() {
  thread_.check("LocalDomain");
  ended_.clear();
  // Each path is the first in turn, because they share the GPUs.
  if (paths_.size() > 1) std::rotate(paths_.begin(), paths_.begin() + 1, paths_.end());
  for (LocalPath* path : paths_) path->poll();
}

bool LocalDomain::prepare_sleep() {
  bool idle = true;
  for (LocalPath* path : paths_) idle = path->prepare_sleep() && idle;
  return idle;
}

void LocalDomain::finish_sleep() {
  for (LocalPath* path : paths_) path->finish_sleep();
}

void LocalDomain::forget_source(const MemoryRegion& region) {
  for (LocalPath* path : paths_) path->forget_source(region);
}

Result<void> LocalDomain::connect(const Session& session) {
  thread_.check("LocalDomain");
  auto rendezvous = Rendezvous::start(session, poller_, host_, on_done());
  if (!rendezvous) return rendezvous.error();
  rendezvous_.push_back(std::move(*rendezvous));
  return {};
}

Result<std::unique_ptr<Path>> LocalDomain::open_path(LocalLink link, PathPeer peer) {
  auto path = LocalPath::open(std::move(link), std::move(peer), poller_, receive_context_,
                              path_events_, gpus_);
  if (!path) return path.error();
  LocalPath& opened = **path;
  paths_.push_back(&opened);
  opened.on_destroyed([this, &opened] { forget(opened); });
  return std::unique_ptr<Path>(std::move(*path));
}

void LocalDomain::forget(const LocalPath& path) {
  std::erase(paths_, &path);
  host_.deny_reader(path.pid());
}

void LocalDomain::expire(std::uint64_t deadline_ns) {
  thread_.check("LocalDomain");
  listener_.resume();
  const auto expired = std::partition(
      rendezvous_.begin(), rendezvous_.end(),
      [&](const auto& rendezvous) { return rendezvous->started_ns() >= deadline_ns; });
  std::vector<std::unique_ptr<Rendezvous>> late(std::make_move_iterator(expired),
                                                std::make_move_iterator(rendezvous_.end()));
  rendezvous_.erase(expired, rendezvous_.end());
  const Error error{Errc::deadline_exceeded, "the local rendezvous did not finish"};
  for (const auto& rendezvous : late) report(*rendezvous, error);
}

void LocalDomain::on_events(std::uint32_t) {
  thread_.check("LocalDomain");
  std::uint64_t count = 0;
  [[maybe_unused]] const auto read = ::read(wake_.get(), &count, sizeof count);
}

void LocalDomain::accept(UniqueFd socket) {
  if (rendezvous_.size() >= kMaxRendezvous) {
    const auto oldest = std::find_if(rendezvous_.begin(), rendezvous_.end(),
                                     [](const auto& known) { return known->stranger(); });
    events_.on_stranger_refused(Errc::backpressure);
    if (oldest == rendezvous_.end()) return;
    rendezvous_.erase(oldest);
  }
  auto rendezvous = Rendezvous::accept(
      std::move(socket), [this](const SessionId& id) { return events_.find_session(id); }, poller_,
      host_, on_done());
  if (rendezvous) rendezvous_.push_back(std::move(*rendezvous));
}

Rendezvous::Done LocalDomain::on_done() {
  return [this](Rendezvous& rendezvous, Result<LocalLink> link) {
    finish(rendezvous, std::move(link));
  };
}

void LocalDomain::finish(Rendezvous& rendezvous, Result<LocalLink> link) {
  const auto found = std::find_if(rendezvous_.begin(), rendezvous_.end(),
                                  [&](const auto& known) { return known.get() == &rendezvous; });
  ended_.push_back(std::move(*found));  // still running, so the next poll() destroys it
  rendezvous_.erase(found);
  report(rendezvous, std::move(link));
}

void LocalDomain::report(const Rendezvous& rendezvous, Result<LocalLink> link) {
  if (rendezvous.stranger()) return events_.on_stranger_refused(link.error().code);
  events_.on_local_link(rendezvous.session(), std::move(link));
}

}  // namespace kvxfer::local
