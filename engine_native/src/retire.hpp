// A thread that frees memory: to unmap or unpin many gigabytes takes seconds, which neither the
// engine thread nor a thread that holds a caller's lock may spend. Any thread may call.
#pragma once

#include <functional>

namespace kvxfer {

// Runs `end` soon, on a thread of the process that does nothing else.
void retire(std::function<void()> end);
// Waits until everything that was retired has ended.
void await_retired();

}  // namespace kvxfer
