// TCP sockets as the engine uses them: numeric addresses, non-blocking, close-on-exec.
#pragma once

#include <cstdint>
#include <string>

#include "fd.hpp"
#include "kvxfer/error.hpp"

namespace kvxfer::net {

// Listens on host:port; port 0 takes a free one. Fails with address-in-use or invalid-argument.
Result<UniqueFd> listen(const std::string& host, std::uint16_t port);
Result<std::uint16_t> local_port(int fd);

// Begins to connect; the socket becomes writable when that has ended, see connect_error().
Result<UniqueFd> dial(const std::string& host, std::uint16_t port);
int connect_error(int fd);

// Turns off Nagle's algorithm, and detects a vanished host even if nothing is being sent.
void set_options(int fd);
// Returns for how long the peer's host has acknowledged nothing; 0 if nothing is under way. A host
// acknowledges even if its process reads nothing; TCP_USER_TIMEOUT would end such a connection.
std::uint64_t unacknowledged_ns(int fd);

}  // namespace kvxfer::net
