#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvxfer::probes {

/// The iovecs of one process_vm_readv call: IOV_MAX of Linux.
inline constexpr std::size_t kReadvBatch = 1024;

/// Source pages and the destination pages they go to. Page p of a pool starts p * page_bytes bytes
/// into it; both lists have the same length.
struct PageLists {
  std::span<const std::int64_t> src;
  std::span<const std::int64_t> dst;
  std::size_t page_bytes;
};

/// Throws std::invalid_argument if the lists differ in length, std::out_of_range if a page
/// leaves its pool.
void check_pages(const PageLists& pages, std::size_t src_bytes, std::size_t dst_bytes);

/// Copies the pages with memcpy, one call per page, on the calling thread.
/// Returns the nanoseconds it took. The pages must have been checked.
std::int64_t copy_pages(std::span<const std::byte> src, std::span<std::byte> dst,
                        const PageLists& pages);

/// Reads the pages out of another process with process_vm_readv, kReadvBatch pages a call.
/// `src_address` is the source pool's address in process `pid`. Returns the nanoseconds it took;
/// throws std::system_error if the kernel refuses.
std::int64_t read_pages(pid_t pid, std::uintptr_t src_address, std::span<std::byte> dst,
                        const PageLists& pages);

/// Lets process `pid` read this process's memory if Yama restricts it (ptrace_scope 1).
/// Without Yama there is nothing to allow.
void allow_reader(pid_t pid);

}  // namespace kvxfer::probes
