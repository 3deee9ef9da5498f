#include "net/socket.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "error_text.hpp"

namespace kvxfer::net {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

// Resolves numeric addresses only: name resolution would block the engine thread.
Result<AddressList> resolve(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list) != 0) {
    return Error{Errc::invalid_argument,
                 "host '" + host + "' is not a numeric IPv4 or IPv6 address"};
  }
  return AddressList(list, &::freeaddrinfo);
}

std::string endpoint(const std::string& host, std::uint16_t port) {
  return host + ":" + std::to_string(port);
}

}  // namespace

Result<UniqueFd> listen(const std::string& host, std::uint16_t port) {
  auto addresses = resolve(host, port);
  if (!addresses) return addresses.error();
  const addrinfo& address = **addresses;
  UniqueFd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (socket) ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (socket && ::bind(socket.get(), address.ai_addr, address.ai_addrlen) == 0 &&
      ::listen(socket.get(), 512) == 0) {
    return socket;
  }
  if (errno == EADDRINUSE) {
    return Error{Errc::address_in_use, "port " + std::to_string(port) + " on " + host +
                                           " is in use; choose another port, or 0 for a free one"};
  }
  const int cause = errno;
  return Error{cause == EACCES ? Errc::permission_denied : Errc::invalid_argument,
               "cannot listen on " + endpoint(host, port) + ": " + errno_text(cause)};
}

Result<std::uint16_t> local_port(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return Error{Errc::invalid_argument, std::string("getsockname: ") + errno_text()};
  }
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

Result<UniqueFd> dial(const std::string& host, std::uint16_t port) {
  auto addresses = resolve(host, port);
  if (!addresses) return addresses.error();
  const addrinfo& address = **addresses;
  UniqueFd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (socket &&
      (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0 || errno == EINPROGRESS)) {
    return socket;
  }
  return Error{Errc::connect_failed,
               "cannot connect to " + endpoint(host, port) + ": " + errno_text()};
}

int connect_error(int fd) {
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

void set_options(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  const int idle_s = 1;
  const int probes = 3;
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &idle_s, sizeof idle_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

std::uint64_t unacknowledged_ns(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_unacked == 0)
    return 0;
  return info.tcpi_last_ack_recv * std::uint64_t{1'000'000};
}

}  // namespace kvxfer::net
