// Unix sockets that carry descriptors, so that two processes of one host can share memory.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "fd.hpp"
#include "kvxfer/error.hpp"

namespace kvxfer::local {

// Both open a socket in the abstract namespace (no file), message-preserving and non-blocking.
Result<UniqueFd> listen_unix(std::string_view name);
Result<UniqueFd> connect_unix(std::string_view name);

struct UnixMessage {
  std::string bytes;
  std::vector<UniqueFd> descriptors;
};

// Sends a message. Returns false if the socket's buffer is full.
Result<bool> send_message(int fd, std::string_view bytes, const std::vector<int>& descriptors);
// Receives a message; `bytes` are empty if none has arrived. Sets `lacking` if this process had no
// room for all descriptors; if `lacking` is null, that is an error.
Result<UnixMessage> receive_message(int fd, bool* lacking = nullptr);

// Returns the process at the other end, as seen from our pid namespace; 0 if it is not visible
// there.
pid_t peer_pid(int fd);
UniqueFd open_pidfd(pid_t pid);

}  // namespace kvxfer::local
