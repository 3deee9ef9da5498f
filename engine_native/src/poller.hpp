// epoll with owners: every descriptor belongs to one EventSink. Engine thread only, except wake().
//
// A forked process closes its copies of the descriptors that a poller of its parent watches: they
// would keep the port taken and peers connected when the parent has died.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "fd.hpp"
#include "kvxfer/error.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class EventSink {
 public:
  // `events` as epoll reports them (EPOLLIN, EPOLLOUT, EPOLLERR, …).
  virtual void on_events(std::uint32_t events) = 0;

 protected:
  ~EventSink() = default;
};

class Poller {
 public:
  static Result<Poller> create();
  ~Poller();
  Poller(Poller&&) = default;
  Poller& operator=(Poller&&) = default;

  Result<void> add(int fd, std::uint32_t events, EventSink& sink);
  void modify(int fd, std::uint32_t events, EventSink& sink);
  // After this the sink is not called again, not even for events that are already fetched.
  void remove(int fd, EventSink& sink);

  // Dispatches ready events; sleeps up to timeout_ns for them.
  void poll(std::uint64_t timeout_ns);

  // Hands the poller to the thread that calls next, before anything is dispatched.
  void hand_over() { thread_.hand_over(); }
  // Ends a sleep of poll(); any thread.
  void wake() const;

 private:
  Poller(UniqueFd epoll, UniqueFd wake) : epoll_(std::move(epoll)), wake_(std::move(wake)) {}

  [[no_unique_address]] ThreadOwner thread_;
  UniqueFd epoll_;
  UniqueFd wake_;
  std::array<epoll_event, 64> ready_{};
  std::size_t ready_count_ = 0;
};

}  // namespace kvxfer
