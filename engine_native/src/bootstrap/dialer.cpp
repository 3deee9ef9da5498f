#include "bootstrap/dialer.hpp"

#include "net/socket.hpp"

namespace kvxfer {

Result<std::unique_ptr<Dialer>> Dialer::dial(const EngineAddress& address, const Identity& identity,
                                             Poller& poller, DialerEvents& events) {
  auto socket = net::dial(address.host, address.port);
  if (!socket) return socket.error();
  std::unique_ptr<Dialer> dialer(new Dialer(address, identity, events));
  auto stream = Stream::open(std::move(*socket), poller, *dialer);
  if (!stream) return stream.error();
  dialer->stream_ = std::move(*stream);
  dialer->stream_->write(dialer->handshake_.hello());
  return dialer;
}

Dialer::Dialer(const EngineAddress& address, const Identity& identity, DialerEvents& events)
    : address_(address), handshake_(identity, address.engine), events_(events) {}

void Dialer::on_input(std::string& in) {
  thread_.check("Dialer");
  if (ended_) return;
  std::string out;
  const auto done = handshake_.advance(in, out);
  stream_->write(std::move(out));
  if (!done) return end(done.error());
  if (*done) end(handshake_.session());
}

void Dialer::on_stream_lost(Error error) {
  if (!ended_) end(Error{Errc::connect_failed, std::move(error.text)});
}

std::string Dialer::trouble() const {
  thread_.check("Dialer");
  if (!stream_ || !stream_->connected()) {
    return "nothing answers there; its host is down or cut off, or a firewall drops the packets";
  }
  if (!handshake_.replied()) {
    return "something accepts connections there, and does not answer; it is no kvxfer engine (an "
           "HTTP port?), or its process is frozen";
  }
  return "the engine there has answered, and then fell silent; its process is frozen or starved";
}

void Dialer::end(Result<Session> result) {
  ended_ = true;
  events_.on_dialed(*this, std::move(result));
}

Result<std::unique_ptr<LaneDialer>> LaneDialer::dial(const EngineAddress& address,
                                                     const Session& session, unsigned lane,
                                                     Poller& poller, DialerEvents& events) {
  auto socket = net::dial(address.host, address.port);
  if (!socket) return socket.error();
  std::unique_ptr<LaneDialer> dialer(new LaneDialer(lane, events));
  auto stream = Stream::open(std::move(*socket), poller, *dialer);
  if (!stream) return stream.error();
  dialer->stream_ = std::move(*stream);
  dialer->stream_->write(LaneHello{.session = session.id, .lane = lane}.encode(session.key));
  return dialer;
}

void LaneDialer::on_input(std::string& in) {
  thread_.check("LaneDialer");
  if (ended_ || in.size() < kLaneAccepted.size()) return;
  ended_ = true;
  if (in != kLaneAccepted) {
    return events_.on_lane_dialed(*this, Error{Errc::protocol_error, "the peer refused a lane"});
  }
  events_.on_lane_dialed(*this, stream_->release());
}

void LaneDialer::on_stream_lost(Error error) {
  if (ended_) return;
  ended_ = true;
  events_.on_lane_dialed(*this, Error{Errc::connect_failed, std::move(error.text)});
}

}  // namespace kvxfer
