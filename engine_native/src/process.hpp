// The identity of this process. A forked process has copies of its parent's objects, but not the
// threads that work for them, so it may only release them. Any thread.
#pragma once

#include <sys/types.h>

#include "kvxfer/error.hpp"

namespace kvxfer {

// Returns getpid(), without a system call.
pid_t this_process();

class OwnProcess {
 public:
  bool here() const { return made_in_ == this_process(); }
  // Fails with engine-closed in a forked process. `what` names the parent's object.
  Result<void> require_here(const char* what) const;

 private:
  pid_t made_in_ = this_process();
};

}  // namespace kvxfer
