// Sockets before they are authenticated: a peer that connects to the engine, a peer that the engine
// dials, and further connections of a session.
#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>

#include <vector>

#include "bootstrap/acceptor.hpp"
#include "bootstrap/bytes.hpp"
#include "bootstrap/dialer.hpp"
#include "correct_peer.hpp"
#include "input.hpp"
#include "net/socket.hpp"
#include "targets.hpp"

namespace kvxfer::fuzz {
namespace {

// Makes closing the socket leave nothing behind in the kernel.
void abort_on_close(int socket) {
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(socket, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
}

void say_to(int socket, std::string_view bytes) {
  (void)!::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

class Engine final : public AcceptorEvents, public DialerEvents, private StreamOwner {
 public:
  Engine() : poller(sound(Poller::create())), acceptor(sound(Acceptor::listen("127.0.0.1", 0))) {
    require(static_cast<bool>(acceptor->start(self, poller, *this)), "an engine can listen");
    listener = sound(net::listen("127.0.0.1", 0));
    dialed_port = sound(net::local_port(listener.get()));
  }
  template <class T>
  static T sound(Result<T> result) {
    require(static_cast<bool>(result), "the system has sockets");
    return std::move(*result);
  }

  void on_accepted(std::unique_ptr<Stream> stream, const Session& session) override {
    require(session.introduction.nics.size() <= kMaxNics, "introductions are bounded");
    stream->set_owner(*this);
    streams.push_back(std::move(stream));
    ++accepted;
  }
  void on_lane_hello(UniqueFd socket, const std::string& hello) override {
    require(hello.size() == kHelloBytes, "a hello comes whole");
    abort_on_close(socket.get());
    (void)lane_hello_valid(hello, kClusterKey);
  }
  void on_handshake_refused(Errc) override {}
  void on_dialed(Dialer& dialer, Result<Session> session) override {
    require(!dialed, "a dialer ends once");
    dialed = true;
    if (!session) return dialer.abandon();
    auto stream = dialer.take_stream();
    stream->set_owner(*this);
    streams.push_back(std::move(stream));
    ++accepted;
  }
  void on_lane_dialed(LaneDialer&, Result<UniqueFd> socket) override {
    require(!dialed, "a dialer ends once");
    dialed = true;
    if (socket) abort_on_close(socket->get());
  }

  Identity self = identity_of(2);
  Poller poller;
  std::unique_ptr<Acceptor> acceptor;
  UniqueFd listener;  // the dialed peer's
  std::uint16_t dialed_port = 0;
  std::vector<std::unique_ptr<Stream>> streams;
  std::size_t accepted = 0;
  bool dialed = false;

 private:
  void on_input(std::string& in) override { in.clear(); }
  void on_sent() override {}
  void on_stream_lost(Error) override {}
};

Engine& engine() {
  static Engine only;
  only.accepted = 0;
  only.dialed = false;
  return only;
}

void poll_twice(Engine& engine) {
  engine.poller.poll(0);
  engine.poller.poll(0);
}

void callers(Input& input) {
  Engine& self = engine();
  sockaddr_in address{.sin_family = AF_INET, .sin_port = htons(self.acceptor->port())};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const std::size_t count = input.below(3) + 1;
  std::vector<UniqueFd> clients;
  for (std::size_t i = 0; i < count; ++i) {
    clients.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    abort_on_close(clients.back().get());
    const int connected = ::connect(clients.back().get(),
                                    reinterpret_cast<const sockaddr*>(&address), sizeof address);
    require(connected == 0 || errno == EINTR, "an engine can be reached");
  }
  const Identity client = identity_of(1);
  ClientHandshake member(client, self.self.engine);
  bool proved = false;
  for (int turns = 0; turns < 16 && !input.empty(); ++turns) {
    UniqueFd& socket = clients[input.below(count)];
    switch (socket ? input.below(6) : 5) {
      case 0:
        say_to(socket.get(), member.hello());
        break;
      case 1: {
        std::array<char, 4096> buffer;
        const ssize_t got = ::recv(socket.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
        std::string in(buffer.data(), static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
        std::string out;
        if (!proved && member.advance(in, out) && !out.empty()) {
          proved = true;
          say_to(socket.get(), out);
        }
        break;
      }
      case 2:
        say_to(socket.get(), LaneHello{.session = {}, .lane = input.byte()}.encode("any"));
        break;
      case 3:
        say_to(socket.get(), input.text());
        break;
      case 4:
        socket.reset();
        break;
      default:
        poll_twice(self);
    }
  }
  poll_twice(self);
  require(self.accepted == 0 || proved, "a stranger is not accepted");
  clients.clear();
  poll_twice(self);
  self.streams.clear();
  self.acceptor->expire(UINT64_MAX);
  require(self.acceptor->idle(), "no connection is kept for ever");
}

// Polls until `done`, because the kernel may take a moment.
template <class Done>
void poll_until(Engine& self, Done done) {
  for (int turns = 0; turns < 10'000 && !done(); ++turns) self.poller.poll(1'000'000);
}

void await_input(Engine& self, int socket) {
  poll_until(self, [socket] {
    pollfd wanted{.fd = socket, .events = POLLIN, .revents = 0};
    return ::poll(&wanted, 1, 0) > 0;
  });
}

void await_end(Engine& self) {
  poll_until(self, [&self] { return self.dialed; });
  require(self.dialed, "a dialer ends with its connection");
}

UniqueFd answer_call(Engine& self) {
  await_input(self, self.listener.get());
  UniqueFd socket(::accept4(self.listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  require(static_cast<bool>(socket), "a dialer calls");
  abort_on_close(socket.get());
  self.poller.poll(0);
  return socket;
}

void answer_dialer(Input& input) {
  Engine& self = engine();
  EngineAddress address{.host = "127.0.0.1", .port = self.dialed_port, .engine = {}};
  address.engine.bytes.fill(1);
  auto dialer = Engine::sound(Dialer::dial(address, self.self, self.poller, self));
  UniqueFd socket = answer_call(self);
  await_input(self, socket.get());
  std::string hello(kHelloBytes, '\0');
  const bool heard =
      ::recv(socket.get(), hello.data(), hello.size(), 0) == static_cast<ssize_t>(hello.size());
  require(heard, "a dialer says hello");
  const bool member = input.flag();
  SignedReply reply = sign_reply(hello, address.engine);
  say_to(socket.get(), member ? reply.bytes : std::string(input.text()));
  poll_twice(self);
  if (member) {
    std::array<char, 4096> proof;
    await_input(self, socket.get());
    const ssize_t got = ::recv(socket.get(), proof.data(), proof.size(), MSG_DONTWAIT);
    require(got > 36, "a dialer proves itself to a member");
    const std::string transcript =
        reply.transcript + std::string(proof.data() + 36, static_cast<std::size_t>(got) - 36);
    const std::string body =
        input.flag() ? identity_of(1).introduction.encode() : std::string(input.rest());
    say_to(socket.get(), sign_introduction(body, reply.session_key, transcript, "kvxfer accept"));
    poll_twice(self);
  }
  require(member || self.accepted == 0, "a stranger is not taken for the peer");
  socket.reset();
  await_end(self);
  self.streams.clear();
}

void answer_lane(Input& input) {
  Engine& self = engine();
  const EngineAddress address{.host = "127.0.0.1", .port = self.dialed_port, .engine = {}};
  auto dialer = Engine::sound(
      LaneDialer::dial(address, Session{.id = {}, .key = "any", .peer = {}, .introduction = {}}, 1,
                       self.poller, self));
  UniqueFd socket = answer_call(self);
  say_to(socket.get(), input.flag() ? std::string(kLaneAccepted) : std::string(input.text()));
  poll_twice(self);
  socket.reset();
  await_end(self);
}

}  // namespace

void bootstrap(std::string_view bytes) {
  Input input(bytes);
  switch (input.below(3)) {
    case 0:
      return callers(input);
    case 1:
      return answer_dialer(input);
    default:
      return answer_lane(input);
  }
}

}  // namespace kvxfer::fuzz
