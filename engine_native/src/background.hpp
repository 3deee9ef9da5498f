// Work that blocks a thread for long: in a NIC's firmware, in the kernel, on a network that does
// not answer. It runs on threads of Background, and its continuation on the engine thread, which
// must not block: peers consider a silent engine dead.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "poller.hpp"
#include "semaphore.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class Background {
 public:
  using Work = std::function<void()>;

  // `poller` is the engine thread's, to wake it.
  explicit Background(const Poller& poller) : poller_(poller) {}
  // Waits for running work; never begins the rest.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Any thread. Begins work in order, as soon as a thread is free; `then` continues it.
  void run(Work work, Work then) { begin(work_, std::move(work), std::move(then)); }
  // Runs work that a fence consists of or waits for. It has threads for itself, so it never waits
  // behind work of run(), which a network may hold up.
  void fence(Work work, Work then) { begin(fences_, std::move(work), std::move(then)); }
  // Passes the result of `work` to `then`.
  template <typename T>
  void run(std::function<T()> work, std::function<void(T)> then) {
    begin_with(work_, std::move(work), std::move(then));
  }
  template <typename T>
  void fence(std::function<T()> work, std::function<void(T)> then) {
    begin_with(fences_, std::move(work), std::move(then));
  }

  // --- engine thread
  // Continues the work that has ended. Returns how much that was.
  std::size_t finish();
  // True if finish() has something to do.
  bool ready() const;
  // True if nothing runs, waits or is to be finished.
  bool idle() const;

 private:
  struct Job {
    Work work;
    Work then;
  };
  // Jobs, and the threads that take them in turn.
  struct Queue {
    Semaphore posted;
    std::deque<Job> jobs;
    std::size_t busy = 0;              // working threads
    std::vector<std::thread> threads;  // started when all others are busy
  };
  void begin(Queue& queue, Work work, Work then);
  template <typename T>
  void begin_with(Queue& queue, std::function<T()> work, std::function<void(T)> then) {
    auto answer = std::make_shared<std::optional<T>>();
    begin(
        queue, [answer, work = std::move(work)] { answer->emplace(work()); },
        [answer, then = std::move(then)] { then(std::move(**answer)); });
  }
  void serve(Queue& queue);
  void end(Queue& queue);

  [[no_unique_address]] ThreadOwner thread_;
  const Poller& poller_;
  mutable std::mutex mutex_;  // guards all below
  Queue work_;
  Queue fences_;
  std::vector<Work> ended_;
  std::size_t pending_ = 0;  // not finished yet
  bool stopping_ = false;
};

}  // namespace kvxfer
