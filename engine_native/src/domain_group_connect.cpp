// How peers come and go.
#include <sys/socket.h>

#include <algorithm>

#include "clock.hpp"
#include "domain_group.hpp"
#include "net/socket.hpp"

namespace kvxfer {
namespace {

// Messages that have arrived and nobody has drained.
constexpr std::size_t kMaxUnreadBytes = 64u << 20;
// Accepted peers whose paths are not there yet; one more closes the oldest.
constexpr std::ptrdiff_t kMaxOpening = 1024;

}  // namespace

std::shared_ptr<PeerHandle> DomainGroup::find_peer(PeerId peer) const {
  const std::lock_guard lock(handles_mutex_);
  const auto found = handles_.find(peer);
  return found == handles_.end() ? nullptr : found->second;
}

// --- connecting ------------------------------------------------------------------------------

void DomainGroup::connect(OperationId id, const EngineAddress& address, Duration timeout) {
  const bool posted = post([this, id, address, timeout] { begin_connect(id, address, timeout); });
  if (!posted) complete_connect(id, Error{Errc::engine_closed, "this engine was closed"});
}

void DomainGroup::begin_connect(OperationId id, const EngineAddress& address, Duration timeout) {
  if (address.engine == address_.engine) {
    return complete_connect(id,
                            Error{Errc::invalid_argument, "an engine cannot connect to itself"});
  }
  const std::uint64_t deadline = now_ns() + static_cast<std::uint64_t>(timeout.count());
  for (const auto& [peer_id, peer] : peers_) {
    if (peer->session().peer != address.engine || peer->state() == Peer::State::lost) continue;
    if (peer->up()) return complete_connect(id, peer_id);
    return peer->waiters.add(id, deadline);
  }
  for (const auto& dialer : dialers_) {
    const bool same = dialer->address().engine == address.engine && !address.engine.any();
    if (!dialer->ended() && same) {
      return dialer->waiters.add(id, deadline);
    }
  }
  auto dialer = Dialer::dial(address, identity_, poller_, *this);
  if (!dialer) return complete_connect(id, dialer.error());
  (*dialer)->waiters.add(id, deadline);
  dialers_.push_back(std::move(*dialer));
}

void DomainGroup::expire_connects(std::uint64_t now) {
  const auto give_up = [this](const std::vector<OperationId>& late, const std::string& whom,
                              const std::string& why) {
    for (const OperationId id : late) {
      std::string text = "connecting to " + whom + " took longer than allowed";
      if (!why.empty()) text += ": " + why;
      complete_connect(id, Error{Errc::connect_failed, std::move(text)});
    }
  };
  for (const auto& dialer : dialers_) {
    give_up(dialer->waiters.take_late(now), dialer->address().text(), "");
    if (dialer->waiters.empty()) dialer->abandon();
  }
  std::erase_if(dialers_, [](const auto& dialer) { return dialer->ended(); });
  for (const auto& [id, peer] : peers_) {
    give_up(peer->waiters.take_late(now), peer->label(), peer->trouble());
  }
}

void DomainGroup::complete_connect(OperationId id, const Result<PeerId>& peer) {
  Completion completion{.kind = Completion::Kind::connect, .id = id};
  if (peer) {
    completion.peer = *peer;
  } else {
    completion.code = peer.error().code;
    completion.text = peer.error().text;
  }
  completions_->push(std::move(completion));
}

void DomainGroup::on_dialed(Dialer& dialer, Result<Session> session) {
  if (!session) {
    const Error error{session.error().code, "connecting to " + dialer.address().text() +
                                                " failed: " + session.error().text};
    for (const OperationId id : dialer.waiters.take()) complete_connect(id, error);
    dialer.abandon();
    return;
  }
  Peer& peer = add_peer(dialer.take_stream(), *session);
  peer.address = dialer.address();
  peer.address.engine = session->peer;
  peer.waiters = std::move(dialer.waiters);
  peer.use_nics(nics_, true, options_);
  open_paths(peer);
}

void DomainGroup::open_paths(Peer& peer) {
  const Introduction& theirs = peer.session().introduction;
  if (local_ && theirs.local) {
    if (theirs.host == identity_.introduction.host) {
      const auto begun = local_->connect(peer.session());
      if (begun) return;  // on_local_link() goes on
      note_fallback(peer, begun.error().text);
      return open_remote_paths(peer, begun.error().text);
    }
    if (!peer.nics() && (lanes_.empty() || !theirs.tcp)) {
      return peer.lose({Errc::connect_failed,
                        "it runs on another host (or network namespace), where the local fabric "
                        "does not reach, and no other fabric is enabled on both sides"});
    }
  }
  open_remote_paths(peer);
}

void DomainGroup::open_remote_paths(Peer& peer, const std::string& local_trouble) {
  const Introduction& theirs = peer.session().introduction;
  if (lanes_.empty() || !theirs.tcp) {
    if (peer.paths().empty() && !peer.nics()) {
      std::string text =
          "no common fabric: both sides need tcp, NICs of one network, or local on "
          "one host";
      if (!local_trouble.empty()) text += "; local failed: " + local_trouble;
      return peer.lose({Errc::connect_failed, std::move(text)});
    }
    if (peer.nics()) peer.nics()->open_missing(now_ns());
    return peer.announce_paths();
  }
  // Unequal numbers: the side with fewer lanes serves several connections with one.
  const unsigned count = std::max<unsigned>(options_.lanes, theirs.lanes);
  peer.lanes_to_open = count;
  for (unsigned lane = 0; lane < count; ++lane) {
    auto dialer = LaneDialer::dial(peer.address, peer.session(), lane, poller_, *this);
    if (!dialer) return peer.lose(dialer.error());
    (*dialer)->peer = peer.id();
    lane_dialers_.push_back(std::move(*dialer));
  }
  if (peer.nics()) peer.nics()->open_missing(now_ns());
}

void DomainGroup::on_lane_dialed(LaneDialer& dialer, Result<UniqueFd> socket) {
  const auto found = peers_.find(dialer.peer);
  if (found == peers_.end() || found->second->state() != Peer::State::opening) return;
  Peer& peer = *found->second;
  if (!socket) return peer.lose(socket.error());
  set_socket_options(socket->get());
  auto path = lanes_[dialer.lane() % lanes_.size()]->open_path(std::move(*socket),
                                                               {peer.id(), peer.label()});
  if (!path) return peer.lose(path.error());
  peer.add_path(std::move(*path), dialer.lane());
  --peer.lanes_to_open;
  peer.announce_paths();
}

void DomainGroup::note_fallback(const Peer& peer, const std::string& why) {
  if (told_fallback_) return;
  told_fallback_ = true;
  completions_->push({.kind = Completion::Kind::notice,
                      .peer = peer.id(),
                      .text = "the local fabric cannot be used in full with peer " + peer.label() +
                              " on this host, falling back to tcp: " + why});
}

// --- being connected to ----------------------------------------------------------------------

void DomainGroup::on_accepted(std::unique_ptr<Stream> stream, const Session& session) {
  limit_opening();
  add_peer(std::move(stream), session).use_nics(nics_, false, options_);
}

// Who knows the cluster key may take its time, but not without end in number.
void DomainGroup::limit_opening() {
  const auto opening = [](const auto& entry) {
    return entry.second->state() == Peer::State::opening && !entry.second->initiator();
  };
  if (std::count_if(peers_.begin(), peers_.end(), opening) < kMaxOpening) return;
  PeerId oldest = last_peer_;
  for (const auto& entry : peers_) {
    if (opening(entry)) oldest = std::min(oldest, entry.first);
  }
  peers_.at(oldest)->lose({Errc::backpressure, "too many peers are being connected at once"});
}

void DomainGroup::on_lane_hello(UniqueFd socket, const std::string& hello) {
  const LaneHello lane = decode_lane_hello(hello);
  Peer* peer = find_session_peer(lane.session);
  const bool valid =
      peer && peer->state() == Peer::State::opening && !lanes_.empty() &&
      lane_hello_valid(hello, peer->session().key) &&
      lane.lane < std::max<unsigned>(options_.lanes, peer->session().introduction.lanes) &&
      !peer->has_lane(lane.lane);
  if (!valid) return stats_.handshakes_refused.count(Errc::authentication_failed);
  set_socket_options(socket.get());
  // A fresh socket always takes four bytes.
  if (::send(socket.get(), kLaneAccepted.data(), kLaneAccepted.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(kLaneAccepted.size())) {
    return;
  }
  auto path =
      lanes_[lane.lane % lanes_.size()]->open_path(std::move(socket), {peer->id(), peer->label()});
  if (!path) return peer->lose(path.error());
  peer->add_path(std::move(*path), lane.lane);
}

// --- both sides ------------------------------------------------------------------------------

const Session* DomainGroup::find_session(const SessionId& session) {
  Peer* peer = find_session_peer(session);
  return peer && peer->state() == Peer::State::opening ? &peer->session() : nullptr;
}

Peer* DomainGroup::find_session_peer(const SessionId& session) {
  for (const auto& [id, peer] : peers_) {
    if (peer->session().id == session) return peer.get();
  }
  return nullptr;
}

void DomainGroup::on_local_link(const SessionId& session, Result<local::LocalLink> link) {
  Peer* peer = find_session_peer(session);
  if (!peer || peer->state() != Peer::State::opening) return;
  if (!link) {
    if (!peer->initiator()) return;  // the initiator decides what to do without
    note_fallback(*peer, link.error().text);
    return open_remote_paths(*peer, link.error().text);
  }
  const bool reads_both_ways = link->peer_reads_us && link->we_read_peer;
  auto path = local_->open_path(std::move(*link), {peer->id(), peer->label()});
  if (!path) return peer->lose(path.error());
  peer->add_path(std::move(*path), kLocalPathLane);
  if (!peer->initiator()) return;
  if (reads_both_ways) return peer->announce_paths();
  note_fallback(*peer,
                "one process may not read the other's memory (another user, pid namespace or "
                "ptrace_scope), so only memory from alloc() goes over the local fabric");
  open_remote_paths(*peer);
}

void DomainGroup::set_socket_options(int fd) const {
  // The heartbeat decides; TCP's own timeout is only the second to.
  net::set_options(fd, 2 * static_cast<std::uint64_t>(options_.peer_timeout.count()));
}

Peer& DomainGroup::add_peer(std::unique_ptr<Stream> stream, const Session& session) {
  const PeerId id = ++last_peer_;
  set_socket_options(stream->fd());
  PeerEvents& events = *this;
  auto peer = std::make_unique<Peer>(id, std::move(stream), session, events);
  return *peers_.emplace(id, std::move(peer)).first->second;
}

void DomainGroup::on_up(Peer& peer) {
  {
    const std::lock_guard lock(handles_mutex_);
    handles_.emplace(peer.id(), peer.handle());
  }
  completions_->push({.kind = Completion::Kind::peer_up,
                      .peer = peer.id(),
                      .text = peer.session().introduction.name,
                      .data = peer.session().peer.hex(),
                      .fabric = peer.fabric()});
  for (const OperationId id : peer.waiters.take()) complete_connect(id, peer.id());
}

void DomainGroup::on_message(Peer& peer, std::string data) {
  ++activity_;
  if (completions_->waiting_bytes() > kMaxUnreadBytes) {
    return peer.lose({Errc::backpressure, "its messages are not being taken here"});
  }
  completions_->push(
      {.kind = Completion::Kind::message, .peer = peer.id(), .data = std::move(data)});
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
  const bool running = run_on_engine_thread([&] {
    const auto found = peers_.find(id);
    if (found != peers_.end()) {
      if (say_goodbye) found->second->say_goodbye({});
      close_peer(id, why);
      waits = true;
    }
    const auto closing = closing_.find(id);
    if (closing == closing_.end()) return closed->set_value();
    closing->second.waiting.push_back(closed);
    waits = true;
  });
  if (running) await(closed->get_future());
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
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  Peer& peer = *found->second;
  if (error.code == Errc::protocol_error || error.code == Errc::backpressure) {
    stats_.peers_refused.count(error.code);
  }
  if (error.code == Errc::nic_lost) peer.say_goodbye(error);
  closing_[id] = {.peer = std::move(found->second),
                  .why = {error.code, "peer " + peer.label() + ": " + error.text}};
  peers_.erase(found);
  if (local_) {
    for (const auto& path : peer.paths()) local_->close_path(*path);
  }
  peer.close_paths([this, id] { finish_closing(id); });
}

void DomainGroup::finish_closing(PeerId id) {
  const auto found = closing_.find(id);
  const Closing closed = std::move(found->second);
  closing_.erase(found);
  if (!nics_.empty()) {
    background_.run(
        [regions = regions_.all(), id] {
          for (const RegionPtr& region : regions) region->unshare(id);
        },
        [] {});
  }
  forget_revocations(id);
  const auto orphans =
      operations_that([id](const Operation& operation) { return operation.peer == id; });
  for (const OperationPtr& operation : orphans) {
    operation->fail(closed.why.code, closed.why.text);
    end_operation(operation);
  }
  for (const OperationId waiter : closed.peer->waiters.take()) complete_connect(waiter, closed.why);
  if (closed.peer->was_up()) {
    {
      const std::lock_guard lock(handles_mutex_);
      handles_.erase(id);
    }
    completions_->push({.kind = Completion::Kind::peer_down,
                        .peer = id,
                        .code = closed.why.code,
                        .text = closed.why.text});
  }
  for (const auto& waiting : closed.waiting) waiting->set_value();
}

}  // namespace kvxfer
