#include "cuda/gpu_thread.hpp"

#include <pthread.h>
#include <sched.h>

#include <future>
#include <utility>

#include "clock.hpp"

namespace kvxfer::cuda {
namespace {

constexpr const char* kThreadName = "kvxfer-gpu";

}  // namespace

GpuThread::GpuThread(std::uint64_t spin_ns) {
  thread_ = std::thread([this, spin_ns] {
    ::pthread_setname_np(::pthread_self(), kThreadName);
    serve(jobs_, spin_ns);
  });
}

GpuThread::~GpuThread() {
  jobs_.ending.store(true, std::memory_order_seq_cst);
  wake(jobs_);
  thread_.join();
}

void GpuThread::post(Job job) {
  {
    const std::lock_guard lock(jobs_.mutex);
    jobs_.waiting.push_back(std::move(job));
  }
  // Pairs with the store in sleep(): either this sees the sleep or that sees the job.
  jobs_.count.fetch_add(1, std::memory_order_seq_cst);
  wake(jobs_);
}

void GpuThread::wait() {
  std::promise<void> done;
  post([&done] { done.set_value(); });
  done.get_future().wait();
}

void GpuThread::wake(Jobs& jobs) {
  if (jobs.sleeping.load(std::memory_order_seq_cst)) jobs.woken.release();
}

// --- the thread ------------------------------------------------------------------------------

void GpuThread::serve(Jobs& jobs, std::uint64_t spin_ns) {
  while (true) {
    if (jobs.count.load(std::memory_order_acquire) > 0) {
      next(jobs)();
    } else if (jobs.ending.load(std::memory_order_acquire)) {
      return;
    } else {
      sleep(jobs, spin_ns);
    }
  }
}

GpuThread::Job GpuThread::next(Jobs& jobs) {
  const std::lock_guard lock(jobs.mutex);
  Job job = std::move(jobs.waiting.front());
  jobs.waiting.pop_front();
  jobs.count.fetch_sub(1, std::memory_order_relaxed);
  return job;
}

void GpuThread::sleep(Jobs& jobs, std::uint64_t spin_ns) {
  const auto wanted = [&jobs] {
    return jobs.count.load(std::memory_order_seq_cst) > 0 ||
           jobs.ending.load(std::memory_order_seq_cst);
  };
  for (const std::uint64_t until = now_ns() + spin_ns; now_ns() < until; ::sched_yield()) {
    if (wanted()) return;
  }
  jobs.sleeping.store(true, std::memory_order_seq_cst);
  if (!wanted()) jobs.woken.acquire();
  jobs.sleeping.store(false, std::memory_order_relaxed);
}

}  // namespace kvxfer::cuda
