#include "background.hpp"

namespace kvxfer {
namespace {

// Most of the time a few. As many as this where a network does not answer the kernel, which may
// keep each for seconds.
constexpr std::size_t kMaxThreads = 64;

}  // namespace

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  posted_.release(static_cast<std::ptrdiff_t>(threads_.size()));
  for (std::thread& thread : threads_) thread.join();
}

void Background::run(Work work, Work then) {
  {
    const std::lock_guard lock(mutex_);
    ++pending_;
    jobs_.push_back({std::move(work), std::move(then)});
    if (threads_.size() - busy_ < jobs_.size() && threads_.size() < kMaxThreads) {
      threads_.emplace_back([this] { serve(); });
    }
  }
  posted_.release();
}

void Background::serve() {
  while (true) {
    posted_.acquire();
    std::unique_lock lock(mutex_);
    if (stopping_) return;
    ++busy_;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job.work();
    job.work = nullptr;  // with what it holds
    lock.lock();
    --busy_;
    ended_.push_back(std::move(job.then));
    poller_.wake();
  }
}

std::size_t Background::finish() {
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
