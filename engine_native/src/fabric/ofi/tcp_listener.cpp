#include "fabric/ofi/tcp_listener.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "fd.hpp"

namespace kvxfer::ofi {
namespace {

template <class Address>
Address as(const std::string& bytes) {
  Address address{};
  std::memcpy(&address, bytes.data(), std::min(bytes.size(), sizeof address));
  return address;
}

bool same_address(const std::string& one, const std::string& other) {
  const sa_family_t family = as<sockaddr>(one).sa_family;
  if (family != as<sockaddr>(other).sa_family) return false;
  if (family == AF_INET) {
    const auto a = as<sockaddr_in>(one);
    const auto b = as<sockaddr_in>(other);
    return a.sin_port == b.sin_port && a.sin_addr.s_addr == b.sin_addr.s_addr;
  }
  const auto a = as<sockaddr_in6>(one);
  const auto b = as<sockaddr_in6>(other);
  return family == AF_INET6 && a.sin6_port == b.sin6_port &&
         std::memcmp(&a.sin6_addr, &b.sin6_addr, sizeof a.sin6_addr) == 0;
}

// Calls `action` for each socket of this process with this address, with a duplicate descriptor:
// the owner may close the original at any time, and its number may then name another file.
template <class Action>
void for_each_socket(const std::string& address, const Action& action) {
  std::error_code error;
  for (std::filesystem::directory_iterator each("/proc/self/fd", error), end; !error && each != end;
       each.increment(error)) {
    const std::string name = each->path().filename();
    int number = -1;
    std::from_chars(name.data(), name.data() + name.size(), number);
    const UniqueFd socket(::fcntl(number, F_DUPFD_CLOEXEC, 0));
    std::string local(sizeof(sockaddr_storage), '\0');
    auto size = static_cast<socklen_t>(local.size());
    struct stat status{};
    if (!socket || ::fstat(socket.get(), &status) != 0 || !S_ISSOCK(status.st_mode) ||
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(local.data()), &size) != 0 ||
        !same_address(local, address)) {
      continue;
    }
    int listens = 0;
    socklen_t length = sizeof listens;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ACCEPTCONN, &listens, &length);
    action(socket.get(), status.st_ino, listens != 0);
  }
}

}  // namespace

void TcpListener::shut() {
  for_each_socket(address_, [this](int socket, ino_t inode, bool listens) {
    if (!listens) return;
    inode_ = inode;
    ::shutdown(socket, SHUT_RDWR);
  });
}

std::size_t TcpListener::shut_accepted() {
  std::size_t count = 0;
  for_each_socket(address_, [&](int socket, ino_t inode, bool listens) {
    // A socket that listens is another endpoint's, which has got the free port.
    if (inode == inode_ || listens) return;
    ::shutdown(socket, SHUT_RDWR);
    ++count;
  });
  return count;
}

}  // namespace kvxfer::ofi
