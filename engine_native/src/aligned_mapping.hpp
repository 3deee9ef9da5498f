// Maps shared memory so that it can have huge pages.
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

// Maps `bytes` of the descriptor at a 2 MiB boundary and asks for huge pages. Returns null, with
// errno set, on failure. munmap() with the same size ends the mapping.
std::byte* map_aligned(int fd, std::size_t bytes, int protection, const Kernel& kernel = {});

// Makes freshly mapped shared memory resident in huge pages if the kernel can (MADV_COLLAPSE,
// Linux 6.1), whether or not the host enables them for shared memory. Reading scattered pages
// through small page tables costs half the bandwidth. Best effort: the rest is populated on use.
void populate_huge(std::byte* data, std::size_t bytes);

}  // namespace kvxfer
