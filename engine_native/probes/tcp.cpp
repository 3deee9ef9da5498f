#include "tcp.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <system_error>
#include <thread>

namespace kvxfer::probes {
namespace {

constexpr std::byte kSignal{1};

void send_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      throw std::system_error(errno, std::generic_category(), "send");
    }
    bytes = bytes.subspan(static_cast<std::size_t>(sent));
  }
}

void receive_all(int fd, std::span<std::byte> bytes, Wait wait = Wait::kSleep) {
  const int flags = wait == Wait::kSpin ? MSG_DONTWAIT : 0;
  const std::int64_t deadline = now_ns() + kPatienceNs;
  while (!bytes.empty()) {
    const ssize_t got = recv(fd, bytes.data(), bytes.size(), flags);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    } else if (got == 0) {
      throw std::system_error(ECONNRESET, std::generic_category(), "recv");
    } else if (errno != EINTR && errno != EAGAIN) {
      throw std::system_error(errno, std::generic_category(), "recv");
    } else if (now_ns() > deadline) {
      throw std::system_error(ETIMEDOUT, std::generic_category(), "recv");
    }
  }
}

void signal(int fd) { send_all(fd, {&kSignal, 1}); }

void await_signal(int fd, Wait wait = Wait::kSleep) {
  std::byte signal{};
  receive_all(fd, {&signal, 1}, wait);
}

}  // namespace

std::vector<std::int64_t> tcp_send(int fd, std::size_t nbytes, std::size_t times,
                                   std::span<const std::byte> buffer) {
  std::vector<std::int64_t> elapsed_ns;
  elapsed_ns.reserve(times);
  await_signal(fd);
  for (std::size_t i = 0; i < times; ++i) {
    const std::int64_t start = now_ns();
    for (std::size_t left = nbytes; left > 0;) {
      const std::size_t chunk = std::min(left, buffer.size());
      send_all(fd, buffer.first(chunk));
      left -= chunk;
    }
    await_signal(fd);
    elapsed_ns.push_back(now_ns() - start);
  }
  return elapsed_ns;
}

void tcp_receive(int fd, std::size_t nbytes, std::size_t times, std::span<std::byte> buffer) {
  signal(fd);
  for (std::size_t i = 0; i < times; ++i) {
    for (std::size_t left = nbytes; left > 0;) {
      const std::size_t chunk = std::min(left, buffer.size());
      receive_all(fd, buffer.first(chunk));
      left -= chunk;
    }
    signal(fd);
  }
}

std::vector<std::int64_t> tcp_ping(int fd, std::size_t message_bytes, std::size_t count,
                                   std::int64_t gap_ns, Wait wait) {
  const std::vector<std::byte> message(message_bytes, std::byte{0x5a});
  std::vector<std::int64_t> sent_at;
  sent_at.reserve(count);
  await_signal(fd, wait);
  for (std::size_t i = 0; i < count; ++i) {
    if (gap_ns > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(gap_ns));
    sent_at.push_back(now_ns());
    send_all(fd, message);
    await_signal(fd, wait);
  }
  return sent_at;
}

std::vector<std::int64_t> tcp_pong(int fd, std::size_t message_bytes, std::size_t count,
                                   Wait wait) {
  std::vector<std::byte> message(message_bytes, std::byte{0xa5});
  std::vector<std::int64_t> arrived_at;
  arrived_at.reserve(count);
  signal(fd);
  for (std::size_t i = 0; i < count; ++i) {
    receive_all(fd, message, wait);
    arrived_at.push_back(now_ns());
    signal(fd);
  }
  return arrived_at;
}

}  // namespace kvxfer::probes
