#include "group/connections.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <string>
#include <utility>

#include "clock.hpp"
#include "net/socket.hpp"

namespace kvxfer {
namespace {

// The time for a stranger to prove that it knows the cluster key.
constexpr std::uint64_t kHandshakeNs = 5'000'000'000u;
// The time for two engines of a host to share memory; short, so that tcp can follow in a connect.
constexpr std::uint64_t kRendezvousNs = 500'000'000u;
// The maximum number of accepted peers whose paths are not open yet; one more closes the oldest.
constexpr std::ptrdiff_t kMaxOpening = 1024;

}  // namespace

Result<void> Connections::start() {
  return acceptor_->start(context_.identity, context_.poller, *this);
}

bool Connections::idle() const {
  const local::LocalDomain* const local = context_.fabrics.local();
  return dialers_.empty() && acceptor_->idle() && (!local || local->idle());
}

void Connections::close() {
  thread_.check("Connections");
  for (const auto& dialer : dialers_) {
    if (!dialer->ended()) {
      on_dialed(*dialer, Error{Errc::engine_closed, "this engine is being closed"});
    }
  }
  lane_dialers_.clear();
  dialers_.clear();
  acceptor_.reset();
}

// --- connecting ------------------------------------------------------------------------------

void Connections::begin(OperationId id, const EngineAddress& address, std::uint64_t deadline_ns) {
  thread_.check("Connections");
  if (address.engine == context_.identity.engine) {
    return complete(id, Error{Errc::invalid_argument, "an engine cannot connect to itself"});
  }
  for (const auto& [peer_id, peer] : context_.peers.all()) {
    if (peer->session().peer != address.engine || peer->state() == Peer::State::lost) continue;
    if (peer->up()) return complete(id, peer_id);
    return peer->waiters.add(id, deadline_ns);
  }
  for (const auto& dialer : dialers_) {
    const bool same = dialer->address().engine == address.engine && !address.engine.any();
    if (!dialer->ended() && same) {
      return dialer->waiters.add(id, deadline_ns);
    }
  }
  auto dialer = Dialer::dial(address, context_.identity, context_.poller, *this);
  if (!dialer) return complete(id, dialer.error());
  (*dialer)->waiters.add(id, deadline_ns);
  dialers_.push_back(std::move(*dialer));
}

void Connections::expire(std::uint64_t now, std::uint64_t stalled_ns) {
  thread_.check("Connections");
  const auto give_up = [this](const std::vector<OperationId>& late, const std::string& whom,
                              const std::string& why) {
    for (const OperationId id : late) {
      std::string text = "connecting to " + whom + " took longer than allowed";
      if (!why.empty()) text += ": " + why;
      complete(id, Error{Errc::connect_failed, std::move(text)});
    }
  };
  for (const auto& dialer : dialers_) {
    give_up(dialer->waiters.take_late(now), dialer->address().text(), dialer->trouble());
    if (dialer->waiters.empty()) dialer->abandon();
  }
  std::erase_if(dialers_, [](const auto& dialer) { return dialer->ended(); });
  for (const auto& [id, peer] : context_.peers.all()) {
    give_up(peer->waiters.take_late(now), peer->label(), peer->trouble());
  }
  std::erase_if(lane_dialers_, [&](const auto& dialer) {
    return dialer->ended() || !context_.peers.find(dialer->peer);
  });
  acceptor_->expire(now - std::min(now, kHandshakeNs + stalled_ns));
  const Fabrics& fabrics = context_.fabrics;
  if (!fabrics.local()) return;
  const bool only = fabrics.lanes().empty() && fabrics.nics().empty();
  fabrics.local()->expire(now - std::min(now, (only ? kHandshakeNs : kRendezvousNs) + stalled_ns));
}

void Connections::complete(OperationId id, const Result<PeerId>& peer) {
  Completion completion{.kind = Completion::Kind::connect, .id = id};
  if (peer) {
    completion.peer = *peer;
  } else {
    completion.code = peer.error().code;
    completion.text = peer.error().text;
  }
  context_.completions.push(std::move(completion));
}

void Connections::on_dialed(Dialer& dialer, Result<Session> session) {
  if (!session) {
    const Error error{session.error().code, "connecting to " + dialer.address().text() +
                                                " failed: " + session.error().text};
    for (const OperationId id : dialer.waiters.take()) complete(id, error);
    dialer.abandon();
    return;
  }
  Peer& peer = add_peer(dialer.take_stream(), *session);
  peer.address = dialer.address();
  peer.address.engine = session->peer;
  peer.waiters = std::move(dialer.waiters);
  peer.use_nics(context_.fabrics.nics(), true, context_.options);
  open_paths(peer);
}

void Connections::open_paths(Peer& peer) {
  const Introduction& theirs = peer.session().introduction;
  if (context_.fabrics.local() && theirs.local) {
    if (theirs.host == context_.identity.introduction.host) {
      const auto begun = context_.fabrics.local()->connect(peer.session());
      if (begun) return;  // on_local_link() continues
      note_fallback(peer, begun.error().text);
      return open_remote_paths(peer, begun.error().text);
    }
    if (!peer.nics() && (context_.fabrics.lanes().empty() || !theirs.tcp)) {
      return peer.lose({Errc::connect_failed,
                        "it runs on another host (or network namespace), where the local fabric "
                        "does not reach, and no other fabric is enabled on both sides"});
    }
  }
  open_remote_paths(peer);
}

void Connections::open_remote_paths(Peer& peer, const std::string& local_trouble) {
  const Introduction& theirs = peer.session().introduction;
  if (context_.fabrics.lanes().empty() || !theirs.tcp) {
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
  // If the numbers differ, the side with fewer lanes serves several connections with one.
  const unsigned count = std::max<unsigned>(context_.options.tuning.lanes, theirs.lanes);
  peer.lanes_to_open = count;
  for (unsigned lane = 0; lane < count; ++lane) {
    auto dialer = LaneDialer::dial(peer.address, peer.session(), lane, context_.poller, *this);
    if (!dialer) return peer.lose(dialer.error());
    (*dialer)->peer = peer.id();
    lane_dialers_.push_back(std::move(*dialer));
  }
  if (peer.nics()) peer.nics()->open_missing(now_ns());
}

void Connections::on_lane_dialed(LaneDialer& dialer, Result<UniqueFd> socket) {
  Peer* const peer = context_.peers.find(dialer.peer);
  if (!peer || peer->state() != Peer::State::opening) return;
  if (!socket) return peer->lose(socket.error());
  net::set_options(socket->get());
  if (!add_lane(*peer, std::move(*socket), dialer.lane())) return;
  --peer->lanes_to_open;
  peer->announce_paths();
}

// Returns false, and loses the peer, on failure.
bool Connections::add_lane(Peer& peer, UniqueFd socket, std::uint32_t lane) {
  const auto& lanes = context_.fabrics.lanes();
  auto path = lanes[lane % lanes.size()]->open_path(std::move(socket), peer.end_of_path());
  if (path) {
    peer.add_path(std::move(*path), lane);
  } else {
    peer.lose(path.error());
  }
  return static_cast<bool>(path);
}

void Connections::note_fallback(const Peer& peer, const std::string& why) {
  if (told_fallback_) return;
  told_fallback_ = true;
  context_.completions.push({.kind = Completion::Kind::notice,
                             .peer = peer.id(),
                             .text = "the local fabric cannot be used in full with peer " +
                                     peer.label() + " on this host, falling back to tcp: " + why});
}

// --- being connected to ----------------------------------------------------------------------

void Connections::on_accepted(std::unique_ptr<Stream> stream, const Session& session) {
  limit_opening();
  add_peer(std::move(stream), session).use_nics(context_.fabrics.nics(), false, context_.options);
}

// Peers that know the cluster key have no time limit; their number is bounded.
void Connections::limit_opening() {
  const auto opening = [](const auto& entry) {
    return entry.second->state() == Peer::State::opening && !entry.second->initiator();
  };
  const auto& peers = context_.peers.all();
  if (std::count_if(peers.begin(), peers.end(), opening) < kMaxOpening) return;
  Peer* oldest = nullptr;
  for (const auto& entry : peers) {
    if (opening(entry) && (!oldest || entry.first < oldest->id())) oldest = entry.second.get();
  }
  oldest->lose({Errc::backpressure, "too many peers are being connected at once"});
}

void Connections::on_lane_hello(UniqueFd socket, const std::string& hello) {
  const LaneHello lane = decode_lane_hello(hello);
  Peer* const peer = context_.peers.find(lane.session);
  const bool valid = peer && peer->state() == Peer::State::opening &&
                     !context_.fabrics.lanes().empty() &&
                     lane_hello_valid(hello, peer->session().key) &&
                     lane.lane < std::max<unsigned>(context_.options.tuning.lanes,
                                                    peer->session().introduction.lanes) &&
                     !peer->has_lane(lane.lane);
  if (!valid) return context_.stats.handshakes_refused.count(Errc::authentication_failed);
  net::set_options(socket.get());
  // A fresh socket always takes four bytes.
  if (::send(socket.get(), kLaneAccepted.data(), kLaneAccepted.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(kLaneAccepted.size())) {
    return;
  }
  add_lane(*peer, std::move(socket), lane.lane);
}

// --- both sides ------------------------------------------------------------------------------

const Session* Connections::find_session(const SessionId& session) {
  Peer* const peer = context_.peers.find(session);
  return peer && peer->state() == Peer::State::opening ? &peer->session() : nullptr;
}

void Connections::on_local_link(const SessionId& session, Result<local::LocalLink> link) {
  Peer* const peer = context_.peers.find(session);
  if (!peer || peer->state() != Peer::State::opening) return;
  if (!link) {
    if (!peer->initiator()) return;  // the initiator decides how to go on
    note_fallback(*peer, link.error().text);
    return open_remote_paths(*peer, link.error().text);
  }
  const bool reads_both_ways = link->peer_reads_us && link->we_read_peer;
  auto path = context_.fabrics.local()->open_path(std::move(*link), peer->end_of_path());
  if (!path) return peer->lose(path.error());
  peer->add_path(std::move(*path), kLocalPathLane);
  if (!peer->initiator()) return;
  if (reads_both_ways) return peer->announce_paths();
  note_fallback(*peer,
                "one process may not read the other's memory (another user, pid namespace or "
                "ptrace_scope), so only memory from alloc() goes over the local fabric");
  open_remote_paths(*peer);
}

Peer& Connections::add_peer(std::unique_ptr<Stream> stream, const Session& session) {
  net::set_options(stream->fd());
  return context_.peers.add(std::move(stream), session, context_.peer_events, context_.operations);
}

}  // namespace kvxfer
