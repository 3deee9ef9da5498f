#include "background.hpp"

#include <pthread.h>

namespace kvxfer {
namespace {

// The maximum number of threads of a queue. Usually a few suffice; if a network does not answer,
// the kernel may block each for seconds.
constexpr std::size_t kMaxThreads = 64;
// Differs from the engine thread's name, by which peers see whether that thread lacks a core.
constexpr const char* kThreadName = "kvxfer-work";

}  // namespace

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  end(work_);
  end(fences_);
}

void Background::end(Queue& queue) {
  for (std::size_t i = 0; i < queue.threads.size(); ++i) queue.posted.release();
  for (std::thread& thread : queue.threads) thread.join();
}

void Background::begin(Queue& queue, Work work, Work then) {
  {
    const std::lock_guard lock(mutex_);
    ++pending_;
    queue.jobs.push_back({std::move(work), std::move(then)});
    if (queue.threads.size() - queue.busy < queue.jobs.size() &&
        queue.threads.size() < kMaxThreads) {
      queue.threads.emplace_back([this, &queue] { serve(queue); });
    }
  }
  queue.posted.release();
}

void Background::serve(Queue& queue) {
  ::pthread_setname_np(::pthread_self(), kThreadName);
  while (true) {
    queue.posted.acquire();
    std::unique_lock lock(mutex_);
    if (stopping_) return;
    ++queue.busy;
    Job job = std::move(queue.jobs.front());
    queue.jobs.pop_front();
    lock.unlock();
    job.work();
    job.work = nullptr;  // releases what it holds
    lock.lock();
    --queue.busy;
    ended_.push_back(std::move(job.then));
    poller_.wake();
  }
}

std::size_t Background::finish() {
  thread_.check("Background");
  std::vector<Work> ended;
  {
    const std::lock_guard lock(mutex_);
    ended.swap(ended_);
  }
  for (Work& then : ended) {
    then();
    then = nullptr;
  }
  if (ended.empty()) return 0;
  const std::lock_guard lock(mutex_);
  pending_ -= ended.size();
  return ended.size();
}

bool Background::ready() const {
  const std::lock_guard lock(mutex_);
  return !ended_.empty();
}

bool Background::idle() const {
  const std::lock_guard lock(mutex_);
  return pending_ == 0;
}

}  // namespace kvxfer
