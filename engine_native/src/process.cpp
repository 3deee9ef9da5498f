#include "process.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <string>

namespace kvxfer {
namespace {

std::atomic<pid_t> process = 0;

void look() { process.store(::getpid(), std::memory_order_relaxed); }

bool look_after_forks() {
  look();
  return ::pthread_atfork(nullptr, nullptr, look) == 0;
}

}  // namespace

pid_t this_process() {
  static const bool looks = look_after_forks();
  return looks ? process.load(std::memory_order_relaxed) : ::getpid();
}

Result<void> OwnProcess::require_here(const char* what) const {
  if (here()) return {};
  return Error{Errc::engine_closed, std::string(what) + " belongs to process " +
                                        std::to_string(made_in_) +
                                        ", from which this one was forked; make one here"};
}

}  // namespace kvxfer
