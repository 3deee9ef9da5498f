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
  // Called with all bytes that have arrived and were not taken yet; take from the front of `in`.
  virtual void on_input(std::string& in) = 0;
  // Called when the bytes of one write() have been sent.
  virtual void on_sent() = 0;
  // Called when nothing more comes. The stream may be destroyed only after this returned.
  virtual void on_stream_lost(Error error) = 0;

 protected:
  ~StreamOwner() = default;
};

class Stream final : private EventSink {
 public:
  // Takes over a socket, which may still be connecting.
  static Result<std::unique_ptr<Stream>> open(UniqueFd socket, Poller& poller, StreamOwner& owner);
  ~Stream();

  void set_owner(StreamOwner& owner) { owner_ = &owner; }
  // Queues bytes, and sends as many as the socket takes at once.
  void write(std::string bytes);
  // True if the other end's host has accepted the connection.
  bool connected() const { return connected_; }
  std::size_t unsent() const { return unsent_; }
  // True if bytes have come that were not read yet.
  bool has_input() const;
  int fd() const { return socket_.get(); }
  // Gives up the socket; only if nothing is buffered.
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
  std::size_t front_sent_ = 0;  // bytes sent of out_.front()
  std::size_t unsent_ = 0;
  bool connected_ = false;
  bool waiting_for_room_ = true;  // until connected
  bool lost_ = false;
};

}  // namespace kvxfer
