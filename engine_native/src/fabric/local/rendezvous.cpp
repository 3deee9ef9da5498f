#include "fabric/local/rendezvous.hpp"

#include <sys/prctl.h>
#include <sys/uio.h>

#include <cstring>

#include "bootstrap/bytes.hpp"
#include "clock.hpp"
#include "fabric/local/unix_socket.hpp"

namespace kvxfer::local {
namespace {

constexpr std::uint32_t kLocalLane = 0xffffffff;

std::string reply_mac(const Session& session) {
  return std::string(view(hmac_sha256(session.key, "kvxfer local", view(Mac{}))));
}

Error malformed() {
  return {Errc::protocol_error, "the peer sent a malformed local rendezvous message"};
}

Result<void> send_all(int fd, const std::string& bytes, const std::vector<int>& descriptors) {
  const auto sent = send_message(fd, bytes, descriptors);
  if (!sent) return sent.error();
  if (!*sent) return Error{Errc::peer_lost, "the peer's unix socket is full"};
  return {};
}

}  // namespace

std::string socket_name(const EngineId& engine) { return "kvxfer-" + engine.hex(); }

void LocalHost::allow_reader(pid_t pid) {
  if (pid == 0 || readable_by != 0) return;
  // Fails without Yama; then nothing has to be allowed.
  if (::prctl(PR_SET_PTRACER, static_cast<unsigned long>(pid), 0, 0, 0) == 0) readable_by = pid;
}

void LocalHost::deny_reader(pid_t pid) {
  if (pid == 0 || readable_by != pid) return;
  ::prctl(PR_SET_PTRACER, 0, 0, 0, 0);
  readable_by = 0;
}

Result<std::unique_ptr<Rendezvous>> Rendezvous::start(const Session& session, Poller& poller,
                                                      LocalHost& host, Done done) {
  auto socket = connect_unix(socket_name(session.peer));
  if (!socket) return socket.error();
  std::unique_ptr<Rendezvous> self(
      new Rendezvous(std::move(*socket), Wait::reply, poller, host, std::move(done)));
  self->session_ = session;
  self->pid_ = peer_pid(self->socket_.get());
  auto ring = SharedRing::create();
  if (!ring) return ring.error();
  self->out_.emplace(std::move(*ring));
  const LaneHello hello{.session = session.id, .lane = kLocalLane};
  const auto sent =
      send_all(self->socket_.get(), hello.encode(session.key), {self->out_->memfd(), host.wake_fd});
  if (!sent) return sent.error();
  if (auto good = poller.add(self->socket_.get(), EPOLLIN, *self); !good) return good.error();
  return self;
}

Result<std::unique_ptr<Rendezvous>> Rendezvous::accept(UniqueFd socket, FindSession find,
                                                       Poller& poller, LocalHost& host, Done done) {
  std::unique_ptr<Rendezvous> self(
      new Rendezvous(std::move(socket), Wait::hello, poller, host, std::move(done)));
  self->find_ = std::move(find);
  self->stranger_ = true;
  self->pid_ = peer_pid(self->socket_.get());
  if (auto good = poller.add(self->socket_.get(), EPOLLIN, *self); !good) return good.error();
  return self;
}

Rendezvous::Rendezvous(UniqueFd socket, Wait wait, Poller& poller, LocalHost& host, Done done)
    : socket_(std::move(socket)),
      wait_(wait),
      poller_(poller),
      host_(host),
      done_(std::move(done)),
      started_ns_(now_ns()) {}

Rendezvous::~Rendezvous() {
  if (socket_) poller_.remove(socket_.get(), *this);
}

void Rendezvous::on_events(std::uint32_t) {
  if (finished_) return;
  const auto complete = advance();
  if (complete && !*complete) return;
  finished_ = true;
  poller_.remove(socket_.get(), *this);
  if (!complete) return done_(*this, complete.error());
  done_(*this, LocalLink{.socket = std::move(socket_),
                         .out = std::move(*out_),
                         .in = std::move(*in_),
                         .wake_peer = std::move(wake_peer_),
                         .pid = pid_,
                         .pidfd = open_pidfd(pid_),
                         .peer_reads_us = peer_reads_us_,
                         .we_read_peer = we_read_peer_});
}

Result<bool> Rendezvous::advance() {
  switch (wait_) {
    case Wait::hello:
      return on_hello();
    case Wait::reply:
      return on_reply();
    case Wait::probe:
      return on_probe();
    case Wait::verdict:
      return on_verdict();
  }
  return malformed();
}

Result<bool> Rendezvous::on_hello() {
  auto message = receive_message(socket_.get());
  if (!message) return message.error();
  if (message->bytes.empty()) return false;
  const std::string_view hello = message->bytes;
  if (hello.size() != kHelloBytes || hello_kind(hello) != HelloKind::lane) return malformed();
  const Session* session = find_(decode_lane_hello(hello).session);
  if (!session || decode_lane_hello(hello).lane != kLocalLane ||
      !lane_hello_valid(hello, session->key)) {
    return Error{Errc::authentication_failed, "a local rendezvous without a session"};
  }
  session_ = *session;
  stranger_ = false;
  if (auto good = take_descriptors(message->descriptors); !good) return good.error();
  auto ring = SharedRing::create();
  if (!ring) return ring.error();
  out_.emplace(std::move(*ring));
  host_.allow_reader(pid_);
  const auto sent =
      send_all(socket_.get(), reply_mac(session_) + ByteWriter().put(own_probe()).take(),
               {out_->memfd(), host_.wake_fd});
  if (!sent) return sent.error();
  wait_ = Wait::probe;
  return false;
}

Result<bool> Rendezvous::on_reply() {
  auto message = receive_message(socket_.get());
  if (!message) return message.error();
  if (message->bytes.empty()) return false;
  const std::string expected = reply_mac(session_);
  const std::string_view bytes = message->bytes;
  if (bytes.size() != expected.size() + sizeof(Probe)) return malformed();
  if (bytes.substr(0, expected.size()) != expected) {
    return Error{Errc::authentication_failed, "the local rendezvous is not with the peer engine"};
  }
  if (auto good = take_descriptors(message->descriptors); !good) return good.error();
  host_.allow_reader(pid_);
  we_read_peer_ = can_read(ByteReader(bytes.substr(expected.size())).get<Probe>());
  const auto sent =
      send_all(socket_.get(), ByteWriter().put(we_read_peer_).put(own_probe()).take(), {});
  if (!sent) return sent.error();
  wait_ = Wait::verdict;
  return false;
}

Result<bool> Rendezvous::on_probe() {
  auto message = receive_message(socket_.get());
  if (!message) return message.error();
  if (message->bytes.empty()) return false;
  if (message->bytes.size() != 1 + sizeof(Probe)) return malformed();
  ByteReader reader(message->bytes);
  peer_reads_us_ = reader.get<std::uint8_t>() != 0;
  we_read_peer_ = can_read(reader.get<Probe>());
  if (auto sent = send_all(socket_.get(), ByteWriter().put(we_read_peer_).take(), {}); !sent) {
    return sent.error();
  }
  return true;
}

Result<bool> Rendezvous::on_verdict() {
  auto message = receive_message(socket_.get());
  if (!message) return message.error();
  if (message->bytes.empty()) return false;
  if (message->bytes.size() != 1) return malformed();
  peer_reads_us_ = message->bytes[0] != 0;
  return true;
}

Result<void> Rendezvous::take_descriptors(std::vector<UniqueFd>& descriptors) {
  if (descriptors.size() != 2) return malformed();
  auto ring = SharedRing::map(std::move(descriptors[0]));
  if (!ring) return ring.error();
  in_.emplace(std::move(*ring));
  wake_peer_ = std::move(descriptors[1]);
  return {};
}

bool Rendezvous::can_read(const Probe& probe) const {
  if (pid_ == 0 || !open_pidfd(pid_)) return false;
  std::array<std::uint8_t, 16> found{};
  const iovec local{found.data(), found.size()};
  const iovec remote{reinterpret_cast<void*>(probe.address), probe.bytes.size()};
  return ::process_vm_readv(pid_, &local, 1, &remote, 1, 0) == static_cast<ssize_t>(found.size()) &&
         found == probe.bytes;
}

Rendezvous::Probe Rendezvous::own_probe() const {
  return {reinterpret_cast<std::uint64_t>(host_.probe.data()), host_.probe};
}

}  // namespace kvxfer::local
