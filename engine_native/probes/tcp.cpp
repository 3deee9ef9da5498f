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

std::int64_t tcp_send(int fd, std::size_t nbytes, std::size_t buffer_bytes) {
  const std::vector<std::byte> buffer(buffer_bytes, std::byte{0x5a});
  await_signal(fd);
  const std::int64_t start = now_ns();
  for (std::size_t left = nbytes; left > 0;) {
    const std::size_t chunk = std::min(left, buffer_bytes);
    send_all(fd, std::span(buffer).first(chunk));
    left -= chunk;
  }
  await_signal(fd);
  return now_ns() - start;
}

void tcp_receive(int fd, std::size_t nbytes, std::size_t buffer_bytes) {
  std::vector<std::byte> buffer(buffer_bytes, std::byte{0xa5});
  signal(fd);
  for (std::size_t left = nbytes; left > 0;) {
    const std::size_t chunk = std::min(left, buffer_bytes);
    receive_all(fd, std::span(buffer).first(chunk));
    left -= chunk;
  }
  signal(fd);
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
