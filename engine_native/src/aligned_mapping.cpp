#include "aligned_mapping.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

namespace kvxfer {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // newer than glibc 2.36
#endif

}  // namespace

std::byte* map_aligned(int fd, std::size_t bytes, int protection, const Kernel& kernel) {
  // Reserve address space with room for the boundary, map into it, give the rest back.
  const std::size_t mapped = (bytes + kernel.page - 1) / kernel.page * kernel.page;
  const std::size_t reserve = mapped + kHugePage;
  void* space =
      kernel.mmap(nullptr, reserve, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return nullptr;
  const auto start = reinterpret_cast<std::uintptr_t>(space);
  const auto aligned = (start + kHugePage - 1) & ~(kHugePage - 1);
  void* data = kernel.mmap(reinterpret_cast<void*>(aligned), bytes, protection,
                           MAP_SHARED | MAP_FIXED, fd, 0);
  const int error = errno;
  if (data == MAP_FAILED) {
    kernel.munmap(space, reserve);
    errno = error;
    return nullptr;
  }
  if (aligned > start) kernel.munmap(space, aligned - start);
  const auto end = aligned + mapped;
  if (start + reserve > end) kernel.munmap(reinterpret_cast<void*>(end), start + reserve - end);
  ::madvise(data, bytes, MADV_HUGEPAGE);  // advice only
  return static_cast<std::byte*>(data);
}

void populate_huge(std::byte* data, std::size_t bytes) {
  // A range without any page cannot be collapsed, so one page of each is touched first.
  for (std::size_t at = 0; at + kHugePage <= bytes; at += kHugePage) {
    *static_cast<volatile std::byte*>(data + at) = std::byte{0};
    if (::madvise(data + at, kHugePage, MADV_COLLAPSE) != 0 && errno != EAGAIN) return;
  }
}

}  // namespace kvxfer
