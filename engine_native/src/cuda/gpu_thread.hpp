// A thread for calls of CUDA that may wait: for the GPU, or for the lock of its context, which the
// driver holds while any thread allocates, frees or loads a kernel.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "semaphore.hpp"

namespace kvxfer::cuda {

class GpuThread {
 public:
  using Job = std::function<void()>;

  // `spin_ns`: the time for which it polls for the next job before it sleeps.
  explicit GpuThread(std::uint64_t spin_ns);
  // Runs all jobs first.
  ~GpuThread();
  GpuThread(const GpuThread&) = delete;
  GpuThread& operator=(const GpuThread&) = delete;

  // Any thread. Jobs run in order, one after the other.
  void post(Job job);
  // Any other thread: waits until all jobs that were posted before have run.
  void wait();

 private:
  struct Jobs {
    std::mutex mutex;
    std::deque<Job> waiting;
    std::atomic<std::size_t> count = 0;  // size of waiting
    std::atomic<bool> sleeping = false;
    std::atomic<bool> ending = false;
    Semaphore woken;
  };
  static void serve(Jobs& jobs, std::uint64_t spin_ns);
  static Job next(Jobs& jobs);
  static void sleep(Jobs& jobs, std::uint64_t spin_ns);
  static void wake(Jobs& jobs);

  Jobs jobs_;
  std::thread thread_;
};

}  // namespace kvxfer::cuda
