// Work that keeps a thread for long: a NIC's firmware, the kernel, a network that does not answer.
// It runs on threads of its own, and what follows from it on the engine thread, whose silence peers
// take for death.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "poller.hpp"

namespace kvxfer {

class Background {
 public:
  using Work = std::function<void()>;

  // `poller`: of the engine thread, which is woken.
  explicit Background(const Poller& poller) : poller_(poller) {}

  // Any thread. Work is begun in order, as soon as a thread is free. Destroyed with what has not
  // been begun.
  void run(Work work, Work then);
  // `then` gets what `work` returns.
  template <typename T>
  void run(std::function<T()> work, std::function<void(T)> then) {
    auto answer = std::make_shared<std::optional<T>>();
    run([answer, work = std::move(work)] { answer->emplace(work()); },
        [answer, then = std::move(then)] { then(std::move(**answer)); });
  }

  // --- engine thread
  // Runs what follows from the work that has ended; how much that was.
  std::size_t finish();
  // Whether finish() has something to do.
  bool ready() const;
  // Nothing runs, waits or is to be finished.
  bool idle() const;

 private:
  struct Job {
    Work work;
    Work then;
  };
  void serve(const std::stop_token& stop);

  const Poller& poller_;
  mutable std::mutex mutex_;
  std::condition_variable_any posted_;
  std::deque<Job> jobs_;
  std::vector<Work> ended_;
  std::size_t pending_ = 0;            // not finished yet
  std::size_t free_ = 0;               // threads that wait for work
  std::vector<std::jthread> threads_;  // started when all others are busy
};

}  // namespace kvxfer
