// GPUs as simulated NICs see them: the real place of memory of the double of a CUDA driver, and
// bytes that were written to it but that the GPU does not see yet. The GPU sees them after the
// first flush that begins later and has ended, or after 50 ms (cuda_double_on_flush()).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace kvxfer::test {

// Memory of a GPU as a NIC accesses it; `bytes` is null if there is none.
struct GpuMemory {
  std::byte* bytes = nullptr;
  std::shared_ptr<void> mapping = nullptr;  // for a dmabuf
};
// Finds GPU memory by its address; `bytes` is null for host memory.
GpuMemory gpu_memory_at(const void* address, std::size_t size);
// Finds GPU memory by the double's dmabuf, from `offset` on.
GpuMemory gpu_memory_of(int dmabuf, std::uint64_t offset, std::size_t size);

// Bytes that have arrived at a NIC.
struct Landing {
  std::byte* at;
  std::vector<std::byte> bytes;
  bool on_gpu = false;
  std::shared_ptr<void> mapping = nullptr;
};

// Any thread.
class GpuWrites {
 public:
  // Lands bytes; for host memory, at once.
  void land(Landing landing);
  // Makes the GPU see the bytes that are due by `now`; by default, all that have arrived.
  void flush(std::uint64_t now = UINT64_MAX);
  bool empty() const;

 private:
  struct Unflushed {
    Landing landing;
    std::uint64_t until_ns;
  };

  mutable std::mutex mutex_;
  std::deque<Unflushed> unflushed_;
};

GpuWrites& gpu_writes();

// Called while each flush runs, for tests of this double.
extern std::function<void()> during_flush;

}  // namespace kvxfer::test
