// GPUs as simulated NICs see them: where memory of the double of a CUDA driver really is, and what
// was written into it that the GPU does not know of. That comes to memory when it is flushed, or
// 50 ms later (cuda_double_on_flush()).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace kvxfer::test {

// Memory of a GPU as a NIC reaches it; `bytes` is null where there is none.
struct GpuMemory {
  std::byte* bytes = nullptr;
  std::shared_ptr<void> mapping = nullptr;  // of a dmabuf
};
// By its address, which is null for memory of the host.
GpuMemory gpu_memory_at(const void* address, std::size_t size);
// By the double's dmabuf, from `offset` on.
GpuMemory gpu_memory_of(int dmabuf, std::uint64_t offset, std::size_t size);

// Bytes that have come to a NIC.
struct Landing {
  std::byte* at;
  std::vector<std::byte> bytes;
  bool on_gpu = false;
  std::shared_ptr<void> mapping = nullptr;
};

// Any thread.
class GpuWrites {
 public:
  // To memory of the host at once.
  void land(Landing landing);
  // What came up to now, or by then.
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

}  // namespace kvxfer::test
