#include "background.hpp"

namespace kvxfer {
namespace {

// Most of the time a few. As many as this where a network does not answer the kernel, which may
// keep each for seconds.
constexpr std::size_t kMaxThreads = 64;

}  // namespace

void Background::run(Work work, Work then) {
  {
    const std::lock_guard lock(mutex_);
    ++pending_;
    jobs_.push_back({std::move(work), std::move(then)});
    if (free_ < jobs_.size() && threads_.size() < kMaxThreads) {
      threads_.emplace_back([this](const std::stop_token& stop) { serve(stop); });
    }
  }
  posted_.notify_one();
}

void Background::serve(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (true) {
    ++free_;
    const bool more = posted_.wait(lock, stop, [this] { return !jobs_.empty(); });
    --free_;
    if (!more || stop.stop_requested()) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job.work();
    job.work = nullptr;  // with what it holds
    lock.lock();
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
