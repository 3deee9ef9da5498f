// Maps shared memory where it can have huge pages.
#pragma once

#include <cstddef>

namespace kvxfer {

// Maps `bytes` of the descriptor at a 2 MiB boundary and asks for huge pages. Null, with errno
// set, if that fails. munmap() with the same size ends it.
std::byte* map_aligned(int fd, std::size_t bytes, int protection);

}  // namespace kvxfer
