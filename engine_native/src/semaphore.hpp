// A POSIX semaphore. libstdc++'s std::counting_semaphore may sleep for ever although it was
// released (GCC bug 98033, pytorch/pytorch#177884). Signalling a condition variable may wait for
// threads that it woke before (glibc until 2.41), as long as these get no processor.
#pragma once

#include <semaphore.h>

namespace kvxfer {

// Any thread.
class Semaphore {
 public:
  Semaphore() { ::sem_init(&semaphore_, 0, 0); }
  ~Semaphore() { ::sem_destroy(&semaphore_); }
  Semaphore(const Semaphore&) = delete;
  Semaphore& operator=(const Semaphore&) = delete;

  // Never waits.
  void release() { ::sem_post(&semaphore_); }
  void acquire() {
    while (::sem_wait(&semaphore_) != 0) {  // a signal came
    }
  }

 private:
  sem_t semaphore_;
};

}  // namespace kvxfer
