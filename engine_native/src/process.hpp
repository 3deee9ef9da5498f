// Which process this is. One that was forked has its parent's objects, and none of the threads that
// work for them: they stay the parent's, and the child may only let go of them. Any thread.
#pragma once

#include <sys/types.h>

#include "kvxfer/error.hpp"

namespace kvxfer {

// Like getpid(), without a system call.
pid_t this_process();

class OwnProcess {
 public:
  bool here() const { return made_in_ == this_process(); }
  // Fails in a forked process; `what` belongs to the parent.
  Result<void> require_here(const char* what) const;

 private:
  pid_t made_in_ = this_process();
};

}  // namespace kvxfer
