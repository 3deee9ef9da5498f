// A buffered, non-blocking byte stream over a socket. Engine thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "fd.hpp"
#include "kvxfer/error.hpp"
#include "poller.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class StreamOwner {
 public:
  // `in` holds what has arrived and was not taken yet; take from its front.
  virtual void on_input(std::string& in) = 0;
  // What one call of write() queued has left.
  virtual void on_sent() = 0;
  // Nothing more comes. The stream may be destroyed only after this returned.
  virtual void on_stream_lost(Error error) = 0;

 protected:
  ~StreamOwner() = default;
};

class Stream final : private EventSink {
 public:
  // The socket may still be connecting.
  static Result<std::unique_ptr<Stream>> open(UniqueFd socket, Poller& poller, StreamOwner& owner);
  ~Stream();

  void set_owner(StreamOwner& owner) { owner_ = &owner; }
  // Queues and sends what the socket takes at once.
  void write(std::string bytes);
  // Whether the other end's host has accepted the connection.
  bool connected() const { return connected_; }
  std::size_t unsent() const { return unsent_; }
  // Whether something has come that was not read yet.
  bool has_input() const;
  int fd() const { return socket_.get(); }
  // Hands the socket on; only when nothing is buffered.
  UniqueFd release();

 private:
  Stream(UniqueFd socket, Poller& poller, StreamOwner& owner)
      : socket_(std::move(socket)), poller_(poller), owner_(&owner) {}

  void on_events(std::uint32_t events) override;
  Result<void> receive();
  Result<void> flush();
  void lose(Error error);

  [[no_unique_address]] ThreadOwner thread_;
  UniqueFd socket_;
  Poller& poller_;
  StreamOwner* owner_;
  std::string in_;
  std::deque<std::string> out_;
  std::size_t front_sent_ = 0;  // bytes of out_.front()
  std::size_t unsent_ = 0;
  bool connected_ = false;
  bool waiting_for_room_ = true;  // until connected
  bool lost_ = false;
};

}  // namespace kvxfer
