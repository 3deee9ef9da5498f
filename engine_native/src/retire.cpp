#include "retire.hpp"

#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace kvxfer {
namespace {

class Retirement {
 public:
  // Never destroyed: memory may be given back while the process ends.
  static Retirement& instance() {
    static Retirement* const only = new Retirement;
    return *only;
  }

  void add(std::function<void()> end) {
    if (::getpid() != process_) return end();  // a forked child has no such thread
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(end));
    ++added_;
    changed_.notify_all();
  }

  void await() {
    if (::getpid() != process_) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ == added_; });
  }

 private:
  Retirement() {
    std::thread thread([this] { serve(); });
    ::pthread_setname_np(thread.native_handle(), "kvxfer-retire");
    thread.detach();
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      auto end = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      end();
      end = nullptr;  // releases what it holds
      lock.lock();
      ++ended_;
      changed_.notify_all();
    }
  }

  const pid_t process_ = ::getpid();
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  std::uint64_t added_ = 0;
  std::uint64_t ended_ = 0;
};

}  // namespace

void retire(std::function<void()> end) { Retirement::instance().add(std::move(end)); }

void await_retired() { Retirement::instance().await(); }

}  // namespace kvxfer
