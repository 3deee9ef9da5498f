#include "background.hpp"

#include <pthread.h>

namespace kvxfer {
namespace {

// Of a queue: most of the time a few. As many as this where a network does not answer the kernel,
// which may keep each for seconds.
constexpr std::size_t kMaxThreads = 64;
// Not that of the engine thread, which peers look for to see whether it lacks a core.
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
    job.work = nullptr;  // with what it holds
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
