#include "bootstrap/acceptor.hpp"

#include "clock.hpp"
#include "net/socket.hpp"

namespace kvxfer {
namespace {

// The most connections whose handshake is under way; one more closes the oldest, so that silent
// strangers cannot lock members out.
constexpr std::size_t kMaxInbound = 512;

}  // namespace

// One connection until it is authenticated.
class Acceptor::Inbound final : private StreamOwner {
 public:
  explicit Inbound(Acceptor& acceptor)
      : acceptor_(acceptor), handshake_(*acceptor.identity_), started_ns_(now_ns()) {}

  Result<void> open(UniqueFd socket) {
    auto stream = Stream::open(std::move(socket), *acceptor_.poller_, *this);
    if (!stream) return stream.error();
    stream_ = std::move(*stream);
    return {};
  }

  bool ended() const { return ended_; }
  std::uint64_t started_ns() const { return started_ns_; }
  void refuse(Errc why) {
    ended_ = true;
    acceptor_.events_->on_handshake_refused(why);
  }

 private:
  void on_input(std::string& in) override {
    if (ended_) return in.clear();
    if (!kind_ && in.size() < kHelloBytes) return;
    if (!kind_) kind_ = hello_kind(in);
    switch (*kind_) {
      case HelloKind::control:
        return advance(in);
      case HelloKind::lane:
        ended_ = true;
        return acceptor_.events_->on_lane_hello(stream_->release(), in.substr(0, kHelloBytes));
      case HelloKind::unknown:
        return refuse(Errc::protocol_error);
    }
  }

  void advance(std::string& in) {
    std::string out;
    const auto done = handshake_.advance(in, out);
    stream_->write(std::move(out));
    if (!done) return refuse(done.error().code);
    if (!*done) return;
    ended_ = true;
    acceptor_.events_->on_accepted(std::move(stream_), handshake_.session());
  }

  void on_sent() override {}
  void on_stream_lost(Error error) override {
    if (!ended_) refuse(error.code);
  }

  Acceptor& acceptor_;
  std::unique_ptr<Stream> stream_;
  ServerHandshake handshake_;
  std::optional<HelloKind> kind_;
  std::uint64_t started_ns_;
  bool ended_ = false;
};

Result<std::unique_ptr<Acceptor>> Acceptor::listen(const std::string& host, std::uint16_t port) {
  auto socket = net::listen(host, port);
  if (!socket) return socket.error();
  const auto bound = net::local_port(socket->get());
  if (!bound) return bound.error();
  return std::unique_ptr<Acceptor>(new Acceptor(std::move(*socket), *bound));
}

Acceptor::Acceptor(UniqueFd socket, std::uint16_t port)
    : listener_(std::move(socket)), port_(port) {}

Acceptor::~Acceptor() = default;

Result<void> Acceptor::start(const Identity& identity, Poller& poller, AcceptorEvents& events) {
  identity_ = &identity;
  poller_ = &poller;
  events_ = &events;
  return listener_.start(poller, [this](UniqueFd socket) { accept(std::move(socket)); });
}

void Acceptor::expire(std::uint64_t deadline_ns) {
  thread_.check("Acceptor");
  listener_.resume();
  std::erase_if(inbound_, [&](const auto& inbound) {
    const bool late = !inbound->ended() && inbound->started_ns() < deadline_ns;
    if (late) inbound->refuse(Errc::deadline_exceeded);
    return inbound->ended();
  });
}

void Acceptor::accept(UniqueFd socket) {
  thread_.check("Acceptor");
  if (inbound_.size() >= kMaxInbound) {
    expire(0);
    if (inbound_.size() >= kMaxInbound) {
      inbound_.front()->refuse(Errc::backpressure);
      inbound_.erase(inbound_.begin());
    }
  }
  auto inbound = std::make_unique<Inbound>(*this);
  if (inbound->open(std::move(socket))) inbound_.push_back(std::move(inbound));
}

}  // namespace kvxfer
