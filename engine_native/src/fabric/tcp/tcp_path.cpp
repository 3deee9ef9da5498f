#include "fabric/tcp/tcp_path.hpp"

#include <algorithm>
#include <string>

#include "clock.hpp"
#include "net/socket.hpp"

namespace kvxfer::tcp {
namespace {

// The most acknowledgements that may wait. Only those of refused batches add up, and a peer that
// reads never leaves so many.
constexpr std::size_t kMaxAcksWaiting = 1u << 16;
// After more bytes than this, acknowledgements are sent at once, because the writer may wait for
// room; after fewer, at the next poll.
constexpr std::uint64_t kMuchBytes = 64u << 10;

}  // namespace

Result<std::unique_ptr<TcpPath>> TcpPath::open(UniqueFd socket, PathPeer peer,
                                               std::size_t window_bytes, Poller& poller,
                                               DuePaths& due, ReceiveContext receive_context,
                                               PathEvents& events) {
  std::unique_ptr<TcpPath> path(new TcpPath(std::move(socket), std::move(peer), window_bytes,
                                            poller, due, receive_context, events));
  if (auto good = poller.add(path->socket_.get(), EPOLLIN, *path); !good) return good.error();
  return path;
}

TcpPath::TcpPath(UniqueFd socket, PathPeer peer, std::size_t window_bytes, Poller& poller,
                 DuePaths& due, ReceiveContext receive_context, PathEvents& events)
    : socket_(std::move(socket)),
      peer_(std::move(peer)),
      poller_(poller),
      due_(due),
      receive_context_(receive_context),
      events_(events),
      sender_(socket_.get(), peer_.groups, window_bytes),
      receiver_(socket_.get(), peer_.id, receive_context_, *this) {}

TcpPath::~TcpPath() {
  // Batches that were placed are delivered, so their acknowledgements go out even now.
  if (!lost_ && !waiting_for_room_) (void)sender_.flush();
  if (owes_) std::erase(due_.owing, this);
  if (copies_) std::erase(due_.copying, this);
  poller_.remove(socket_.get(), *this);
}

std::size_t TcpPath::post(const OperationPtr& operation, const WriteRange& writes) {
  thread_.check("TcpPath");
  const std::size_t posted = sender_.post(operation, writes);
  flush();
  return posted;
}

void TcpPath::on_events(std::uint32_t events) {
  thread_.check("TcpPath");
  if (lost_) return;
  ++receive_context_.activity;
  std::uint64_t read = 0;
  if (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) {
    if (!receive(read)) return;
    last_heard_ns_ = now_ns();
  }
  if (waiting_for_room_ || read > kMuchBytes) {
    flush();
  } else {
    owe();
  }
  note_copies();
}

void TcpPath::step() {
  thread_.check("TcpPath");
  copies_ = false;
  if (lost_) return;
  sender_.drop_lost(events_);
  receiver_.end_placed();
  std::uint64_t read = 0;
  if (receiver_.waits_for_room() && !receive(read)) return;
  flush();
  note_copies();
}

void TcpPath::tick(std::uint64_t now, std::uint64_t stalled_ns, std::uint64_t timeout_ns) {
  thread_.check("TcpPath");
  if (lost_) return;
  const std::uint64_t silent = net::unacknowledged_ns(socket_.get());
  acknowledged_ns_ = std::max(acknowledged_ns_ + stalled_ns, now - std::min(now, silent));
  if (now - std::min(now, acknowledged_ns_) <= timeout_ns) return;
  lose(
      {Errc::peer_timeout, "its host has acknowledged nothing for " +
                               std::to_string((now - acknowledged_ns_) / 1'000'000) +
                               " ms on one TCP connection, while heartbeats came on another; check "
                               "the network between both hosts"});
}

bool TcpPath::receive(std::uint64_t& read) {
  const auto pumped = receiver_.pump();
  if (!pumped) {
    lose(pumped.error());
  } else if (sender_.acks_waiting() > kMaxAcksWaiting) {
    lose({Errc::backpressure, "it does not read the acknowledgements of its writes"});
  } else {
    read = *pumped;
  }
  return !lost_;
}

void TcpPath::owe() {
  if (!sender_.owes_acks() || owes_) return;
  owes_ = true;
  due_.owing.push_back(this);
}

void TcpPath::note_copies() {
  if (copies_ || lost_ || !(sender_.staging() || receiver_.waits_for_gpu())) return;
  copies_ = true;
  due_.copying.push_back(this);
}

void TcpPath::send_acks() {
  owes_ = false;
  if (sender_.owes_acks()) flush();
}

void TcpPath::on_batch_done(std::uint64_t sequence, Errc status) {
  sender_.acknowledge(sequence, status);
}

Result<void> TcpPath::on_ack(std::uint64_t sequence, Errc status) {
  return sender_.on_ack(sequence, status, peer_.label, events_, receive_context_.stats);
}

void TcpPath::flush() {
  if (lost_) return;
  do {
    if (sender_.may_send_staged()) sender_.send_staged();
    if (auto good = sender_.flush(); !good) return lose(good.error());
  } while (sender_.may_send_staged());
  note_copies();
  if (sender_.blocked() != waiting_for_room_) {
    waiting_for_room_ = sender_.blocked();
    poller_.modify(socket_.get(), waiting_for_room_ ? EPOLLIN | EPOLLOUT : EPOLLIN, *this);
  }
}

void TcpPath::lose(const Error& error) {
  lost_ = true;
  poller_.remove(socket_.get(), *this);
  events_.on_lost(*this, error);
}

}  // namespace kvxfer::tcp
