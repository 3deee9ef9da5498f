#include "pages.hpp"

#include <sys/prctl.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "timing.hpp"

namespace kvxfer::probes {
namespace {

void check_list(std::span<const std::int64_t> pages, std::size_t page_bytes, std::size_t pool_bytes,
                const char* side) {
  const auto pool_pages = static_cast<std::int64_t>(pool_bytes / page_bytes);
  for (const std::int64_t page : pages) {
    if (page < 0 || page >= pool_pages) {
      throw std::out_of_range(std::string(side) + " page " + std::to_string(page) +
                              " is outside a pool of " + std::to_string(pool_pages) + " pages");
    }
  }
}

}  // namespace

void check_pages(const PageLists& pages, std::size_t src_bytes, std::size_t dst_bytes) {
  if (pages.page_bytes == 0) throw std::invalid_argument("page_bytes must be positive");
  if (pages.src.size() != pages.dst.size()) {
    throw std::invalid_argument("page lists differ in length: " + std::to_string(pages.src.size()) +
                                " source and " + std::to_string(pages.dst.size()) +
                                " destination pages");
  }
  check_list(pages.src, pages.page_bytes, src_bytes, "source");
  check_list(pages.dst, pages.page_bytes, dst_bytes, "destination");
}

std::int64_t copy_pages(std::span<const std::byte> src, std::span<std::byte> dst,
                        const PageLists& pages) {
  const std::size_t length = pages.page_bytes;
  const std::int64_t start = now_ns();
  for (std::size_t i = 0; i < pages.src.size(); ++i) {
    std::memcpy(dst.data() + static_cast<std::size_t>(pages.dst[i]) * length,
                src.data() + static_cast<std::size_t>(pages.src[i]) * length, length);
  }
  return now_ns() - start;
}

std::int64_t read_pages(pid_t pid, std::uintptr_t src_address, std::span<std::byte> dst,
                        const PageLists& pages) {
  const std::size_t length = pages.page_bytes;
  std::array<iovec, kReadvBatch> local;
  std::array<iovec, kReadvBatch> remote;
  const std::int64_t start = now_ns();
  for (std::size_t first = 0; first < pages.src.size(); first += kReadvBatch) {
    const std::size_t count = std::min(kReadvBatch, pages.src.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      const auto src_page = static_cast<std::size_t>(pages.src[first + i]);
      const auto dst_page = static_cast<std::size_t>(pages.dst[first + i]);
      local[i] = {dst.data() + dst_page * length, length};
      remote[i] = {reinterpret_cast<void*>(src_address + src_page * length), length};
    }
    const ssize_t got = process_vm_readv(pid, local.data(), count, remote.data(), count, 0);
    if (got < 0) throw std::system_error(errno, std::generic_category(), "process_vm_readv");
    if (static_cast<std::size_t>(got) != count * length) {
      throw std::system_error(EFAULT, std::generic_category(), "process_vm_readv: short read");
    }
  }
  return now_ns() - start;
}

void allow_reader(pid_t pid) {
  if (prctl(PR_SET_PTRACER, static_cast<unsigned long>(pid), 0, 0, 0) != 0 && errno != EINVAL) {
    throw std::system_error(errno, std::generic_category(), "prctl(PR_SET_PTRACER)");
  }
}

}  // namespace kvxfer::probes
