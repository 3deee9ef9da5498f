// The connecting side of the bootstrap. Engine thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/connect_waiters.hpp"
#include "bootstrap/handshake.hpp"
#include "bootstrap/stream.hpp"
#include "kvxfer/types.hpp"
#include "poller.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class Dialer;
class LaneDialer;

class DialerEvents {
 public:
  // Called when the dialer has ended; with a session, its stream needs a new owner before this
  // returns (take_stream()).
  virtual void on_dialed(Dialer& dialer, Result<Session> session) = 0;
  virtual void on_lane_dialed(LaneDialer& dialer, Result<UniqueFd> socket) = 0;

 protected:
  ~DialerEvents() = default;
};

// Connects to an engine and authenticates both sides.
class Dialer final : private StreamOwner {
 public:
  static Result<std::unique_ptr<Dialer>> dial(const EngineAddress& address,
                                              const Identity& identity, Poller& poller,
                                              DialerEvents& events);

  const EngineAddress& address() const { return address_; }
  std::unique_ptr<Stream> take_stream() { return std::move(stream_); }
  bool ended() const { return ended_; }
  // Returns why the dialer has not ended yet.
  std::string trouble() const;
  // Ends the dialer without a report.
  void abandon() { ended_ = true; }
  ConnectWaiters waiters;

 private:
  Dialer(const EngineAddress& address, const Identity& identity, DialerEvents& events);

  void on_input(std::string& in) override;
  void on_sent() override {}
  void on_stream_lost(Error error) override;
  void end(Result<Session> result);

  [[no_unique_address]] ThreadOwner thread_;
  EngineAddress address_;
  ClientHandshake handshake_;
  DialerEvents& events_;
  std::unique_ptr<Stream> stream_;
  bool ended_ = false;
};

// Opens one more connection of an authenticated session.
class LaneDialer final : private StreamOwner {
 public:
  static Result<std::unique_ptr<LaneDialer>> dial(const EngineAddress& address,
                                                  const Session& session, unsigned lane,
                                                  Poller& poller, DialerEvents& events);

  PeerId peer = 0;  // the lane's peer
  unsigned lane() const { return lane_; }
  bool ended() const {
    thread_.check("LaneDialer");
    return ended_;
  }

 private:
  LaneDialer(unsigned lane, DialerEvents& events) : lane_(lane), events_(events) {}

  void on_input(std::string& in) override;
  void on_sent() override {}
  void on_stream_lost(Error error) override;

  [[no_unique_address]] ThreadOwner thread_;
  unsigned lane_;
  DialerEvents& events_;
  std::unique_ptr<Stream> stream_;
  bool ended_ = false;
};

}  // namespace kvxfer
