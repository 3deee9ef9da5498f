// The GPUs on which an engine has memory, each opened when it is first needed.
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
  // Returns null if open() has not opened it.
  std::shared_ptr<Gpu> find(int device) const;
  // Returns the GPU that has this memory; null if the processor may access it: host memory, pinned
  // or not, and managed memory. Fails if no engine could move all of it.
  Result<std::shared_ptr<Gpu>> owner_of(const void* address, std::size_t bytes);

  // Notes that NICs write into memory of this GPU from now on.
  void expect_nic_writes(const std::shared_ptr<Gpu>& gpu);

  // Makes kernels see what NICs have written; none of it lands later, if the NICs have stopped
  // writing. May wait for the GPU.
  void flush_nic_writes();

  // --- engine thread
  // Reads how far copies got. Returns how many launches and waits have ended since.
  std::size_t poll();
  bool busy() const;
  // Runs `then` once kernels see what NICs have written, at once if that needs no flush. Runs in
  // order. Must come before immediates are counted.
  void after_flush(std::function<void()> then);
  // Runs `then` once every copy that is under way now has ended. So no copy lands any more in
  // memory that was taken back before.
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
  std::mutex opening_;  // held while a GPU opens, up to seconds; guards driver_
  std::shared_ptr<const Driver> driver_;
  mutable std::mutex mutex_;  // guards open_
  std::vector<std::shared_ptr<Gpu>> open_;
  std::vector<std::shared_ptr<Gpu>> flushed_;  // GPUs that need flushes; also guarded by mutex_
  std::atomic<bool> flushing_ = false;         // true if there are any
  // Engine thread.
  std::vector<Waiting> waiting_;
};

}  // namespace kvxfer::cuda
