#include "group/engine_loop.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>

#include <string>
#include <utility>

#include "clock.hpp"
#include "patience.hpp"

namespace kvxfer {
namespace {

constexpr int kEngineNice = -10;
// Steps between two polls of sockets.
constexpr unsigned kStepsPerPoll = 8;

// Pins the thread to these processors, close to its NICs.
Result<void> pin(pthread_t thread, const std::vector<unsigned>& cpus) {
  if (cpus.empty()) return {};
  cpu_set_t set;
  CPU_ZERO(&set);
  std::string list;
  for (const unsigned cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    list += (list.empty() ? "" : ",") + std::to_string(cpu);
  }
  if (::pthread_setaffinity_np(thread, sizeof set, &set) == 0) return {};
  return Error{Errc::invalid_argument,
               "the engine thread cannot run on cpus " + list +
                   "; choose from those that this process may use (taskset -p PID)"};
}

}  // namespace

Result<void> EngineLoop::start(bool thread, Duration spin, const std::vector<unsigned>& cpus) {
  if (!thread) {
    driven_ = true;
    owner_.check("TransferEngine");
    return {};
  }
  poller_.hand_over();
  thread_ =
      std::jthread([this, spin_ns = static_cast<std::uint64_t>(spin.count())] { turn(spin_ns); });
  ::pthread_setname_np(thread_.native_handle(), kEngineThreadName);
  return pin(thread_.native_handle(), cpus);
}

void EngineLoop::close() {
  if (!process_.here()) return;
  if (driven_) {
    driven_ = false;
    return end();
  }
  if (!thread_.joinable()) return;
  post([this] { stopping_ = true; });
  ended_.wait();
}

// --- commands --------------------------------------------------------------------------------

bool EngineLoop::post(Command command) {
  if (!process_.here()) return false;  // the mutex may be in any state
  if (driven_) {
    owner_.check("TransferEngine");
    command();
    ++activity_;
    return true;
  }
  {
    const std::lock_guard lock(commands_mutex_);
    if (closed_) return false;
    commands_.push_back(std::move(command));
    commanded_.store(true, std::memory_order_release);
  }
  // Pairs with the store in may_sleep(): either this sees the sleep or that sees the command.
  wake();
  return true;
}

bool EngineLoop::run(const Command& command) {
  if (driven_) return post(command);
  // Shared, because the caller may have returned while the promise is still being fulfilled.
  auto done = std::make_shared<std::promise<void>>();
  const bool posted = post([&command, done] {
    command();
    done->set_value();
  });
  posted ? done->get_future().wait() : await_end();
  return posted;
}

void EngineLoop::await_end() const {
  if (process_.here()) ended_.wait();
}

void EngineLoop::wake() const {
  if (sleeping_.load(std::memory_order_seq_cst)) poller_.wake();
}

bool EngineLoop::poll() {
  if (!driven_ || !process_.here()) return false;
  owner_.check("TransferEngine");
  work_.step();
  return std::exchange(activity_told_, activity_) != activity_;
}

// --- engine thread ---------------------------------------------------------------------------

void EngineLoop::turn(std::uint64_t spin_ns) {
  // Runs before threads that compute, if that is permitted: peers consider a silent engine dead.
  ::setpriority(PRIO_PROCESS, 0, kEngineNice);  // on Linux: this thread alone
  std::uint64_t last_progress = now_ns();
  while (!stopping_) {
    const std::uint64_t before = activity_;
    work_.step();
    const std::uint64_t now = now_ns();
    if (activity_ != before) last_progress = now;
    if (now - last_progress < spin_ns) {
      // The scheduler tends to put this thread on the core where its peer is copying: leave it.
      if (activity_ == before) ::sched_yield();
      continue;
    }
    const std::uint64_t next = work_.next_step_ns(now, now - last_progress);
    if (next > now && may_sleep()) poller_.poll(next - now);
    sleeping_.store(false, std::memory_order_relaxed);
    work_.finish_sleep();
  }
  end();
}

bool EngineLoop::may_sleep() {
  sleeping_.store(true, std::memory_order_seq_cst);
  {
    const std::lock_guard lock(commands_mutex_);
    if (!commands_.empty()) return false;
  }
  return work_.prepare_sleep();
}

void EngineLoop::poll_sockets(bool only) {
  owner_.check("EngineLoop");
  const bool moving = std::exchange(activity_before_, activity_) != activity_;
  if (!only && (moving || driven_) && ++steps_ < kStepsPerPoll) return;
  steps_ = 0;
  poller_.poll(0);
}

void EngineLoop::run_commands() {
  owner_.check("EngineLoop");
  if (!commanded_.load(std::memory_order_acquire)) return;
  std::vector<Command> commands;
  {
    const std::lock_guard lock(commands_mutex_);
    commands.swap(commands_);
    commanded_.store(false, std::memory_order_relaxed);
  }
  for (const Command& command : commands) command();
  activity_ += commands.size();
}

void EngineLoop::end() {
  {
    const std::lock_guard lock(commands_mutex_);
    closed_ = true;
  }
  run_commands();
  work_.shut_down();
  ending_.set_value();
}

}  // namespace kvxfer
