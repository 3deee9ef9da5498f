#include "fabric/verbs/async_events.hpp"

#include "error_text.hpp"
#include "fd.hpp"

namespace kvxfer::verbs {

Result<std::unique_ptr<AsyncEvents>> AsyncEvents::watch(std::shared_ptr<const VerbsDevice> device,
                                                        Poller& poller,
                                                        AsyncEventHandler& handler) {
  const int fd = device->context()->async_fd;
  if (!set_nonblocking(fd)) {
    return Error{Errc::fabric_unavailable,
                 "NIC " + device->name() + ": its events cannot be watched: " + errno_text()};
  }
  std::unique_ptr<AsyncEvents> events(new AsyncEvents(std::move(device), poller, handler));
  if (auto good = poller.add(fd, EPOLLIN, *events); !good) return good.error();
  return events;
}

AsyncEvents::~AsyncEvents() { poller_.remove(device_->context()->async_fd, *this); }

void AsyncEvents::take() {
  thread_.check("AsyncEvents");
  ibv_async_event event{};
  while (device_->library().get_async_event(device_->context(), &event) == 0) {
    handler_.on_async_event(event);
    device_->library().ack_async_event(&event);
  }
}

}  // namespace kvxfer::verbs
