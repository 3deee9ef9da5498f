// The GPUs that an engine has memory of, each opened when it is first needed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/gpu.hpp"
#include "thread_owner.hpp"

namespace kvxfer::cuda {

class Gpus {
 public:
  // --- any thread
  Result<std::shared_ptr<Gpu>> open(int device);
  // Null where open() has not opened it.
  std::shared_ptr<Gpu> find(int device) const;
  // Whose memory this is; null where the processor may touch it: host memory, pinned or not, and
  // managed memory. Fails where no engine could move all of it.
  Result<std::shared_ptr<Gpu>> owner_of(const void* address, std::size_t bytes);

  // NICs write into memory of this GPU from now on.
  void expect_nic_writes(const std::shared_ptr<Gpu>& gpu);

  // Kernels see what NICs had written, and nothing of it lands later: once a NIC writes no more.
  // May wait for the GPU.
  void flush_nic_writes();

  // --- engine thread
  // Looks how far copies got; how many launches have ended since.
  std::size_t poll();
  bool busy() const;
  // Runs `then` once kernels see what NICs have written: at once where that needs no flush. In
  // order. Before immediates are counted.
  void after_flush(std::function<void()> then);
  // Runs `then` once every copy that is under way now has ended. So of what was taken back before,
  // no copy lands any more.
  void after_copies(std::function<void()> then);

 private:
  struct Until {
    std::shared_ptr<Gpu> gpu;
    Ticket copied = 0;
    std::uint64_t flushed = 0;
  };
  struct Waiting {
    std::vector<Until> until;
    std::function<void()> then;
  };

  Result<std::shared_ptr<const Driver>> driver();
  std::vector<Until> begin_flushes();
  void after(std::vector<Until> until, std::function<void()> then);

  [[no_unique_address]] ThreadOwner thread_;
  std::mutex opening_;  // one after the other, each for up to seconds; guards driver_
  std::shared_ptr<const Driver> driver_;
  mutable std::mutex mutex_;  // guards open_
  std::vector<std::shared_ptr<Gpu>> open_;
  std::vector<std::shared_ptr<Gpu>> flushed_;  // those that have to be; also guarded by mutex_
  std::atomic<bool> flushing_ = false;         // whether there are any
  // Engine thread.
  std::vector<Waiting> waiting_;
};

}  // namespace kvxfer::cuda
