// The listening side of the bootstrap: authenticates incoming connections. Engine thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/handshake.hpp"
#include "bootstrap/listener.hpp"
#include "bootstrap/stream.hpp"
#include "fd.hpp"
#include "poller.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class AcceptorEvents {
 public:
  // Called when an engine has proved that it knows the cluster key; the stream needs a new owner.
  virtual void on_accepted(std::unique_ptr<Stream> stream, const Session& session) = 0;
  // Called for a further connection of a session, whose hello is not checked yet.
  virtual void on_lane_hello(UniqueFd socket, const std::string& hello) = 0;
  virtual void on_handshake_refused(Errc why) = 0;

 protected:
  ~AcceptorEvents() = default;
};

class Acceptor {
 public:
  static Result<std::unique_ptr<Acceptor>> listen(const std::string& host, std::uint16_t port);
  ~Acceptor();

  std::uint16_t port() const { return port_; }
  Result<void> start(const Identity& identity, Poller& poller, AcceptorEvents& events);
  // Closes connections that began before `deadline_ns` and did not finish their handshake, and
  // accepts again after a rest.
  void expire(std::uint64_t deadline_ns);
  bool idle() const { return inbound_.empty() && !listener_.resting(); }

 private:
  class Inbound;

  Acceptor(UniqueFd socket, std::uint16_t port);
  void accept(UniqueFd socket);

  [[no_unique_address]] ThreadOwner thread_;
  Listener listener_;
  std::uint16_t port_;
  const Identity* identity_ = nullptr;
  Poller* poller_ = nullptr;
  AcceptorEvents* events_ = nullptr;
  std::vector<std::unique_ptr<Inbound>> inbound_;
};

}  // namespace kvxfer
