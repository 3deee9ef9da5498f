// Work that keeps a thread for long: a NIC's firmware, the kernel, a network that does not answer.
// It runs on its own threads, and what follows from it on the engine thread, whose silence peers
// take for death.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <semaphore>
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
  // What has not been begun never is.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Any thread. Work is begun in order, as soon as a thread is free.
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
  void serve();

  const Poller& poller_;
  // Not a condition variable: telling one may wait for threads that it woke before (glibc until
  // 2.41), for as long as these get no processor.
  std::counting_semaphore<> posted_{0};
  mutable std::mutex mutex_;  // guards all below
  std::deque<Job> jobs_;
  std::vector<Work> ended_;
  std::size_t pending_ = 0;  // not finished yet
  std::size_t busy_ = 0;     // threads that work
  bool stopping_ = false;
  std::vector<std::thread> threads_;  // started when all others are busy
};

}  // namespace kvxfer
