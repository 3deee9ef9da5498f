// The GPUs that an engine has memory of, each opened when it is first needed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
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

  // Kernels see what NICs had written, and nothing of it lands later: before immediates are
  // counted, and once a NIC writes no more.
  void flush_nic_writes() {
    if (flushing_.load(std::memory_order_acquire)) flush_all();
  }

  // --- engine thread
  // Looks how far copies got; how many launches have ended since.
  std::size_t poll();
  bool busy() const;
  // Runs `then` once every copy that is under way now has ended: at once where none is. So what was
  // taken back before, also from NICs, lands nowhere any more.
  void after_copies(std::function<void()> then);

 private:
  struct Waiting {
    std::vector<std::pair<std::shared_ptr<Gpu>, Ticket>> until;
    std::function<void()> then;
  };

  Result<std::shared_ptr<const Driver>> driver();
  void flush_all();

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
