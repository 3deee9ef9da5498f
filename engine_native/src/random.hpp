// Unpredictable bytes for keys, nonces and ids.
#pragma once

#include <sys/random.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>

namespace kvxfer {

// getrandom cannot fail for small requests once the kernel is booted, except for signals.
inline void random_bytes(void* out, std::size_t size) {
  auto* bytes = static_cast<unsigned char*>(out);
  while (size > 0) {
    const ssize_t got = ::getrandom(bytes, size, 0);
    if (got < 0 && errno != EINTR) std::abort();
    if (got > 0) {
      bytes += got;
      size -= static_cast<std::size_t>(got);
    }
  }
}

}  // namespace kvxfer
