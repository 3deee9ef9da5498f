#include "moe/own_memory.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <string>
#include <utility>

#include "error_text.hpp"

namespace kvxfer::moe {

Result<OwnMemory> OwnMemory::create(const Shape& shape) {
  const OwnLayout layout(shape);
  auto memory = SharedMemory::allocate(layout.bytes(), layout.own_bytes());
  if (!memory) return memory.error();
  UniqueFd doorbell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!doorbell) {
    return Error{Errc::out_of_memory,
                 "cannot create the doorbell: " + errno_text() + "; raise the open files limit"};
  }
  return OwnMemory(shape, std::move(*memory), std::move(doorbell));
}

OwnMemory::OwnMemory(const Shape& shape, SharedMemoryPtr memory, UniqueFd doorbell)
    : layout_(shape),
      memory_(std::move(memory)),
      doorbell_(std::move(doorbell)),
      taken_(layout_.inboxes()) {
  auto* const head = reinterpret_cast<OwnHead*>(at(0));
  head->magic = OwnHead::kMagic;
  head->digest = digest(shape);
  head->rank = shape.rank;
}

OwnMemory::~OwnMemory() { assert(std::ranges::find(taken_, true) == taken_.end()); }

Result<std::size_t> OwnMemory::take_inbox() {
  const auto free = std::ranges::find(taken_, false);
  if (free == taken_.end()) {
    return Error{Errc::out_of_memory, "all " + std::to_string(taken_.size()) +
                                          " inboxes are taken: end the steps that are under way"};
  }
  const auto number = static_cast<std::size_t>(free - taken_.begin());
  if (auto good = SharedMemory::make_resident(inbox(number)); !good) return good.error();
  *free = true;
  return number;
}

void OwnMemory::poll(int event_fd, int timeout_ms) const {
  std::array<pollfd, 2> fds{{{.fd = event_fd, .events = POLLIN, .revents = 0},
                             {.fd = doorbell_.get(), .events = POLLIN, .revents = 0}}};
  if (::poll(fds.data(), fds.size(), timeout_ms) <= 0 || fds[1].revents == 0) return;
  std::uint64_t rings = 0;
  [[maybe_unused]] const auto read = ::read(doorbell_.get(), &rings, sizeof rings);
}

}  // namespace kvxfer::moe
