// A listening socket that accepts in portions and rests when the process runs out of descriptors.
// Engine thread only.
#pragma once

#include <functional>

#include "fd.hpp"
#include "poller.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class Listener final : private EventSink {
 public:
  using Accepted = std::function<void(UniqueFd socket)>;

  explicit Listener(UniqueFd socket) : socket_(std::move(socket)) {}
  ~Listener();

  int fd() const { return socket_.get(); }
  Result<void> start(Poller& poller, Accepted accepted);
  // Accepts again after a rest; to be called periodically.
  void resume();
  bool resting() const { return resting_; }

 private:
  void on_events(std::uint32_t events) override;

  [[no_unique_address]] ThreadOwner thread_;
  UniqueFd socket_;
  Poller* poller_ = nullptr;
  Accepted accepted_;
  bool resting_ = false;
};

}  // namespace kvxfer
