// The engine thread: what other threads ask of it, its steps, and the sleep between them. Without a
// thread its caller drives it.
#pragma once

#include <atomic>
#include <cassert>
#include <cstdint>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kvxfer/types.hpp"
#include "poller.hpp"
#include "process.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

// What a loop drives. Engine thread only.
class LoopWork {
 public:
  // Does what there is to do, and never sleeps.
  virtual void step() = 0;
  // When it wants the next step though nothing happens. `quiet_ns`: for so long nothing has moved.
  virtual std::uint64_t next_step_ns(std::uint64_t now, std::uint64_t quiet_ns) const = 0;
  // Before a sleep: arranges to be woken. False if there is work after all.
  virtual bool prepare_sleep() = 0;
  virtual void finish_sleep() = 0;
  // The last call.
  virtual void shut_down() = 0;

 protected:
  ~LoopWork() = default;
};

class EngineLoop {
 public:
  using Command = std::function<void()>;

  EngineLoop(Poller poller, LoopWork& work) : poller_(std::move(poller)), work_(work) {}
  ~EngineLoop() { assert(commands_.empty()); }
  EngineLoop(const EngineLoop&) = delete;
  EngineLoop& operator=(const EngineLoop&) = delete;

  // On a thread, which polls for `spin` after something moved; or without one: poll().
  Result<void> start(bool thread, Duration spin, const std::vector<unsigned>& cpus);
  // Idempotent. To be called before what the loop drives is destroyed, which a forked process must
  // not do: here it does nothing.
  void close();

  // --- any thread; where there is none only the caller's, and not within a step. Then what is
  // asked for is done at once.
  bool driven() const { return driven_; }
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  // The one whose thread this is. In another nothing is posted, and nothing waited for.
  const OwnProcess& process() const { return process_; }
  // False once the loop is closed.
  bool post(Command command);
  // Returns once the loop has run it. False, and it has not, where the loop was closed before.
  bool run(const Command& command);
  // For what the loop does; all of it is done once it is closed.
  template <typename T>
  void await(const std::future<T>& done) {
    while (driven_ && done.wait_for(Duration::zero()) != std::future_status::ready) work_.step();
    done.wait();
  }
  void await_end() const;
  // Ends a sleep.
  void wake() const;
  // Without a thread: one step; whether anything has moved since the last one.
  bool poll();

  // --- engine thread
  Poller& poller() { return poller_; }
  // Grows whenever something moves; heartbeats do not count. While it grows the loop does not
  // sleep.
  std::uint64_t& activity() { return activity_; }
  // Looks at sockets: that is a system call, so it is not made at every step while something moves
  // without it, nor where the caller polls for a latency below that. `only`: nothing moves
  // otherwise.
  void poll_sockets(bool only);
  void run_commands();

 private:
  void turn(std::uint64_t spin_ns);
  bool may_sleep();
  void end();

  [[no_unique_address]] ThreadOwner owner_;
  Poller poller_;
  LoopWork& work_;
  const OwnProcess process_;

  std::mutex commands_mutex_;
  std::vector<Command> commands_;
  std::atomic<bool> commanded_ = false;  // whether there are any
  std::atomic<bool> closed_ = false;     // set with commands_mutex_
  std::promise<void> ending_;
  std::shared_future<void> ended_ = ending_.get_future().share();  // nothing is touched any more
  std::atomic<bool> sleeping_ = false;
  bool driven_ = false;  // by its caller, until it is closed

  // Engine thread.
  std::uint64_t activity_ = 0;
  std::uint64_t activity_before_ = 0;  // when sockets were to be looked at
  std::uint64_t activity_told_ = 0;    // by poll()
  unsigned steps_ = 0;                 // since sockets were looked at
  bool stopping_ = false;
  std::jthread thread_;
};

}  // namespace kvxfer
