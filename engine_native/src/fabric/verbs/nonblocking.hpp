// Descriptors that libibverbs opens are blocking.
#pragma once

#include <fcntl.h>

namespace kvxfer::verbs {

inline bool set_nonblocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

}  // namespace kvxfer::verbs
