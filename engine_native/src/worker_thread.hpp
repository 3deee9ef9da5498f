// A thread that runs what it is given, one after the other.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>

namespace kvxfer {

class WorkerThread {
 public:
  using Job = std::function<void()>;

  // Any thread. Jobs that have not begun when this is destroyed are dropped.
  void post(Job job);

 private:
  void run(const std::stop_token& stop);

  std::mutex mutex_;
  std::condition_variable_any posted_;
  std::deque<Job> jobs_;
  std::jthread thread_;  // started by the first job
};

}  // namespace kvxfer
