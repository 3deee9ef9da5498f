// Unix sockets that carry descriptors: how two processes of one host share memory.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "fd.hpp"
#include "kvxfer/error.hpp"

namespace kvxfer::local {

// Sockets in the abstract namespace (no file), message-preserving, non-blocking.
Result<UniqueFd> listen_unix(std::string_view name);
Result<UniqueFd> connect_unix(std::string_view name);

struct UnixMessage {
  std::string bytes;
  std::vector<UniqueFd> descriptors;
};

// False if the socket's buffer is full.
Result<bool> send_message(int fd, std::string_view bytes, const std::vector<int>& descriptors);
// An empty `bytes` means that nothing is there. `lacking`: whether this process had no room for all
// descriptors; an error without it.
Result<UnixMessage> receive_message(int fd, bool* lacking = nullptr);

// The process at the other end, as seen from our pid namespace; 0 if it is not visible there.
pid_t peer_pid(int fd);
UniqueFd open_pidfd(pid_t pid);

}  // namespace kvxfer::local
