// Maps shared memory where it can have huge pages.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

namespace kvxfer {

// The kernel's page size, and its calls.
struct Kernel {
  std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));  // 64 KiB on some aarch64
  decltype(&::mmap) mmap = ::mmap;
  decltype(&::munmap) munmap = ::munmap;
};

// Maps `bytes` of the descriptor at a 2 MiB boundary and asks for huge pages. Null, with errno
// set, if that fails. munmap() with the same size ends it.
std::byte* map_aligned(int fd, std::size_t bytes, int protection, const Kernel& kernel = {});

// Makes freshly mapped shared memory resident in huge pages where the kernel can (MADV_COLLAPSE,
// Linux 6.1), whether or not the host enables them for shared memory. Reading scattered pages
// through small page tables costs half the bandwidth. Best effort: what fails is populated on use.
void populate_huge(std::byte* data, std::size_t bytes);

}  // namespace kvxfer
