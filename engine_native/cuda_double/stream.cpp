#include "stream.hpp"

#include <chrono>
#include <cstdlib>
#include <utility>

namespace kvxfer::cuda_double {

std::uint64_t longest_delay_us() {
  static const std::uint64_t longest = [] {
    const char* const set = std::getenv("CUDA_DOUBLE_DELAY_US");
    return set ? std::strtoull(set, nullptr, 10) : 200;
  }();
  return longest;
}

bool Point::reached() const {
  const std::lock_guard lock(mutex_);
  return reached_;
}

void Point::reach() {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  changed_.notify_all();
}

void Point::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

PointPtr Channel::follow(PointPtr begun) {
  const std::lock_guard lock(mutex_);
  return std::exchange(last_, std::move(begun));
}

Stream::Stream(CUcontext context, bool blocking, std::shared_ptr<Channel> channel,
               std::uint64_t seed)
    : context_(context),
      blocking_(blocking),
      channel_(std::move(channel)),
      last_(std::make_shared<Point>()) {
  last_->reach();
  thread_ = std::thread([this, seed] { serve(seed); });
}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Stream::await_room() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return queue_.size() < kMostQueued; });
}

PointPtr Stream::enqueue_until(std::function<bool()> done, std::vector<PointPtr> after,
                               bool holds) {
  auto end = std::make_shared<Point>();
  auto begun = std::make_shared<Point>();
  const std::lock_guard lock(mutex_);
  if (PointPtr before = channel_->follow(begun)) after.push_back(std::move(before));
  queue_.push_back({std::move(after), std::move(done), end, std::move(begun), holds});
  last_ = end;
  changed_.notify_all();
  return end;
}

PointPtr Stream::last() const {
  const std::lock_guard lock(mutex_);
  return last_;
}

CUcontext& Stream::running() {
  thread_local CUcontext context = nullptr;
  return context;
}

void Stream::serve(std::uint64_t seed) {
  running() = context_;
  std::minstd_rand random(static_cast<std::minstd_rand::result_type>(seed));
  while (true) {
    Work work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
      changed_.notify_all();
    }
    for (const PointPtr& point : work.after) point->wait();
    if (!work.holds) work.begun->reach();
    // Half of the time there is no pause, so that orders that hold by luck break with or without
    // pauses.
    const std::uint64_t longest = longest_delay_us();
    if (longest > 0 && random() % 2 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % longest));
    }
    while (!work.step()) std::this_thread::sleep_for(std::chrono::microseconds(5));
    work.begun->reach();
    work.end->reach();
  }
}

}  // namespace kvxfer::cuda_double
