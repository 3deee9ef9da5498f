#include "fabric/local/unix_socket.hpp"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "error_text.hpp"

namespace kvxfer::local {
namespace {

constexpr std::size_t kMaxMessage = 1024;
constexpr std::size_t kMaxDescriptors = 64;

struct AbstractAddress {
  sockaddr_un address{};
  socklen_t size = 0;
};

AbstractAddress abstract_address(std::string_view name) {
  AbstractAddress result;
  result.address.sun_family = AF_UNIX;
  const std::size_t length = std::min(name.size(), sizeof result.address.sun_path - 1);
  std::memcpy(result.address.sun_path + 1, name.data(), length);  // path[0] == 0: abstract
  result.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return result;
}

Error socket_failed(const char* what) {
  return {errno == EACCES || errno == EPERM ? Errc::permission_denied : Errc::peer_lost,
          std::string(what) + ": " + errno_text()};
}

UniqueFd open_socket() {
  return UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

}  // namespace

Result<UniqueFd> listen_unix(std::string_view name) {
  UniqueFd socket = open_socket();
  const auto [address, size] = abstract_address(name);
  if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(socket.get(), 128) != 0) {
    return socket_failed("cannot listen on a unix socket");
  }
  return socket;
}

Result<UniqueFd> connect_unix(std::string_view name) {
  UniqueFd socket = open_socket();
  const auto [address, size] = abstract_address(name);
  if (!socket || ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    return socket_failed("cannot connect to the peer's unix socket");
  }
  return socket;
}

Result<bool> send_message(int fd, std::string_view bytes, const std::vector<int>& descriptors) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMaxDescriptors)> control{};
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors.size());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
    std::memcpy(CMSG_DATA(header), descriptors.data(), sizeof(int) * descriptors.size());
  }
  while (::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EAGAIN) return false;
    if (errno != EINTR) return socket_failed("sending over the unix socket");
  }
  return true;
}

Result<UnixMessage> receive_message(int fd, bool* lacking) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMaxDescriptors)> control{};
  std::array<char, kMaxMessage> buffer;
  iovec part{buffer.data(), buffer.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = 0;
  while ((got = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)) < 0) {
    if (errno == EAGAIN) return UnixMessage{};
    if (errno != EINTR) return socket_failed("receiving over the unix socket");
  }
  UnixMessage result;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof received);
      result.descriptors.emplace_back(received);
    }
  }
  if (got == 0) return Error{Errc::peer_lost, "the peer closed its unix socket"};
  const bool lacks = (message.msg_flags & MSG_CTRUNC) != 0;
  if (lacking != nullptr) *lacking = lacks;
  if ((message.msg_flags & MSG_TRUNC) != 0 || (lacks && lacking == nullptr)) {
    return Error{Errc::protocol_error,
                 "a unix message of the peer is oversized, or there are no descriptors "
                 "left for what it carries; raise the open files limit"};
  }
  result.bytes.assign(buffer.data(), static_cast<std::size_t>(got));
  return result;
}

pid_t peer_pid(int fd) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return 0;
  return credentials.pid;
}

UniqueFd open_pidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace kvxfer::local
