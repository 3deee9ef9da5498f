#include "poller.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <string_view>

#include "error_text.hpp"

namespace kvxfer {
namespace {

// The epoll sets of this process; 0: unused. A forked process keeps its copies of further sets,
// because code that runs in it may neither lock nor allocate.
std::array<std::atomic<int>, 64> sets;

// Closes each descriptor whose number follows a "tfd:" in the kernel's list (proc_pid_fdinfo(5)).
void close_watched(int list) {
  constexpr std::string_view kBefore = "tfd:";
  std::array<char, 512> some{};
  std::size_t matched = 0;  // characters of kBefore
  int number = -1;
  for (ssize_t got = 0; (got = ::read(list, some.data(), some.size())) > 0;) {
    for (const char each : std::string_view(some.data(), static_cast<std::size_t>(got))) {
      if (matched < kBefore.size()) {
        matched = each == kBefore[matched] ? matched + 1 : 0;
      } else if (each >= '0' && each <= '9') {
        number = std::max(number, 0) * 10 + (each - '0');
      } else if (number >= 0) {
        ::close(number);
        number = -1;
        matched = 0;
      }
    }
  }
}

void close_in_child() {
  for (std::atomic<int>& each : sets) {
    const int set = each.exchange(0);
    if (set == 0) continue;
    std::array<char, 64> path{};
    std::snprintf(path.data(), path.size(), "/proc/self/fdinfo/%d", set);
    const int list = ::open(path.data(), O_RDONLY | O_CLOEXEC);
    if (list < 0) continue;
    close_watched(list);
    ::close(list);
    ::close(set);
  }
}

void close_in_forks(int set) {
  [[maybe_unused]] static const int handled = ::pthread_atfork(nullptr, nullptr, close_in_child);
  for (std::atomic<int>& each : sets) {
    int none = 0;
    if (each.compare_exchange_strong(none, set)) return;
  }
}

}  // namespace

Poller::~Poller() {
  if (!epoll_) return;
  for (std::atomic<int>& each : sets) {
    int set = epoll_.get();
    if (each.compare_exchange_strong(set, 0)) return;
  }
}

Result<Poller> Poller::create() {
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  if (!epoll || !wake || ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return Error{Errc::out_of_memory, std::string("cannot create the engine's epoll set: ") +
                                          errno_text() + "; raise the open files limit"};
  }
  close_in_forks(epoll.get());
  return Poller(std::move(epoll), std::move(wake));
}

Result<void> Poller::add(int fd, std::uint32_t events, EventSink& sink) {
  thread_.check("Poller");
  epoll_event event{.events = events, .data = {.ptr = &sink}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return Error{Errc::out_of_memory, std::string("cannot watch a descriptor: ") + errno_text()};
  }
  return {};
}

void Poller::modify(int fd, std::uint32_t events, EventSink& sink) {
  thread_.check("Poller");
  epoll_event event{.events = events, .data = {.ptr = &sink}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Poller::remove(int fd, EventSink& sink) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  for (std::size_t i = 0; i < ready_count_; ++i) {
    if (ready_[i].data.ptr == &sink) ready_[i].events = 0;
  }
}

void Poller::poll(std::uint64_t timeout_ns) {
  thread_.check("Poller");
  const timespec timeout{.tv_sec = static_cast<time_t>(timeout_ns / 1'000'000'000u),
                         .tv_nsec = static_cast<long>(timeout_ns % 1'000'000'000u)};
  int ready = ::epoll_pwait2(epoll_.get(), ready_.data(), static_cast<int>(ready_.size()), &timeout,
                             nullptr);
  if (ready < 0 && errno != EINTR) {  // Linux before 5.11, or forbidden: in milliseconds
    ready = ::epoll_wait(epoll_.get(), ready_.data(), static_cast<int>(ready_.size()),
                         static_cast<int>((timeout_ns + 999'999) / 1'000'000));
  }
  ready_count_ = ready < 0 ? 0 : static_cast<std::size_t>(ready);
  for (std::size_t i = 0; i < ready_count_; ++i) {
    const auto event = ready_[i];
    if (event.events == 0) continue;
    if (event.data.ptr == nullptr) {
      std::uint64_t count = 0;
      [[maybe_unused]] const auto read = ::read(wake_.get(), &count, sizeof count);
      continue;
    }
    static_cast<EventSink*>(event.data.ptr)->on_events(event.events);
  }
  ready_count_ = 0;
}

void Poller::wake() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
}

}  // namespace kvxfer
