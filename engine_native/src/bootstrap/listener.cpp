#include "bootstrap/listener.hpp"

#include <sys/socket.h>

#include <cerrno>

namespace kvxfer {
namespace {

// The most connections per event, so that a flood of them cannot delay heartbeats.
constexpr int kPortion = 64;

}  // namespace

Listener::~Listener() {
  if (poller_) poller_->remove(fd(), *this);
}

Result<void> Listener::start(Poller& poller, Accepted accepted) {
  if (auto good = poller.add(fd(), EPOLLIN, *this); !good) return good;
  poller_ = &poller;
  accepted_ = std::move(accepted);
  return {};
}

void Listener::resume() {
  thread_.check("Listener");
  if (!resting_) return;
  resting_ = false;
  poller_->modify(fd(), EPOLLIN, *this);
}

void Listener::on_events(std::uint32_t) {
  thread_.check("Listener");
  for (int i = 0; i < kPortion; ++i) {
    UniqueFd socket(::accept4(fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) {
      accepted_(std::move(socket));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN) {
      // Out of descriptors: the connection stays pending, and without a rest it would be reported
      // again at once.
      resting_ = true;
      poller_->modify(fd(), 0, *this);
    }
    return;
  }
}

}  // namespace kvxfer
