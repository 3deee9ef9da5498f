// A device's asynchronous events: links that go up or down, queue pairs that fail. Engine thread
// only.
#pragma once

#include <memory>

#include "fabric/verbs/verbs_device.hpp"
#include "poller.hpp"
#include "thread_owner.hpp"

namespace kvxfer::verbs {

class AsyncEventHandler {
 public:
  virtual void on_async_event(const ibv_async_event& event) = 0;

 protected:
  ~AsyncEventHandler() = default;
};

class AsyncEvents final : private EventSink {
 public:
  static Result<std::unique_ptr<AsyncEvents>> watch(std::shared_ptr<const VerbsDevice> device,
                                                    Poller& poller, AsyncEventHandler& handler);
  ~AsyncEvents();
  AsyncEvents(const AsyncEvents&) = delete;
  AsyncEvents& operator=(const AsyncEvents&) = delete;

  // Passes all pending events to the handler.
  void take();

 private:
  AsyncEvents(std::shared_ptr<const VerbsDevice> device, Poller& poller, AsyncEventHandler& handler)
      : device_(std::move(device)), poller_(poller), handler_(handler) {}
  void on_events(std::uint32_t) override { take(); }

  [[no_unique_address]] ThreadOwner thread_;
  std::shared_ptr<const VerbsDevice> device_;
  Poller& poller_;
  AsyncEventHandler& handler_;
};

}  // namespace kvxfer::verbs
