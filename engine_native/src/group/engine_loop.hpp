// The engine thread: commands of other threads, its steps, and the sleep between them. Without a
// thread, its caller drives it.
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

// The work that a loop drives. Engine thread only.
class LoopWork {
 public:
  // Does the work that is ready, without sleeping.
  virtual void step() = 0;
  // Returns the time of the next step, at the latest. `quiet_ns`: the time since anything moved.
  virtual std::uint64_t next_step_ns(std::uint64_t now, std::uint64_t quiet_ns) const = 0;
  // Called before a sleep: arranges to be woken. Returns false if there is work after all.
  virtual bool prepare_sleep() = 0;
  virtual void finish_sleep() = 0;
  // Must be the last call.
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

  // Starts a thread, which polls for `spin` after something moved. Without one, poll() runs the
  // steps.
  Result<void> start(bool thread, Duration spin, const std::vector<unsigned>& cpus);
  // Ends the loop. Idempotent. Must be called before the work that it drives is destroyed. Does
  // nothing in a forked process, which must not destroy that work.
  void close();

  // --- any thread; without an engine thread only the caller's, and not within a step: then
  // commands run at once.
  bool driven() const { return driven_; }
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  // The process whose thread this is. In another, nothing is posted or awaited.
  const OwnProcess& process() const { return process_; }
  // Queues a command. Returns false once the loop is closed.
  bool post(Command command);
  // Runs a command on the loop and waits for it. Returns false, and runs nothing, once it is
  // closed.
  bool run(const Command& command);
  // Waits for a result of the loop; all are ready once it is closed.
  template <typename T>
  void await(const std::future<T>& done) {
    while (driven_ && done.wait_for(Duration::zero()) != std::future_status::ready) work_.step();
    done.wait();
  }
  void await_end() const;
  // Ends a sleep.
  void wake() const;
  // Without a thread: runs one step. Returns true if anything has moved since the last one.
  bool poll();

  // --- engine thread
  Poller& poller() { return poller_; }
  // Grows whenever something moves; heartbeats do not count. While it grows the loop does not
  // sleep.
  std::uint64_t& activity() { return activity_; }
  // Polls sockets: a system call, so most steps skip it while something else moves, or if the
  // caller drives the loop, to whose latency it would add. `only`: nothing but sockets moves data.
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
  std::atomic<bool> commanded_ = false;  // true if there are any
  std::atomic<bool> closed_ = false;     // set with commands_mutex_
  std::promise<void> ending_;
  std::shared_future<void> ended_ = ending_.get_future().share();  // set at the end
  std::atomic<bool> sleeping_ = false;
  bool driven_ = false;  // the caller drives it, until it is closed

  // Engine thread.
  std::uint64_t activity_ = 0;
  std::uint64_t activity_before_ = 0;  // at the last poll_sockets()
  std::uint64_t activity_told_ = 0;    // reported by poll()
  unsigned steps_ = 0;                 // since sockets were polled
  bool stopping_ = false;
  std::jthread thread_;
};

}  // namespace kvxfer
