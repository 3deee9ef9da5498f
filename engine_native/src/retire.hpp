// Where memory is given back: to unmap or unpin many gigabytes takes seconds, which neither the
// engine thread nor a thread that holds a lock of its caller's may take. Any thread.
#pragma once

#include <functional>

namespace kvxfer {

// Runs `end` soon, on a thread of the process that does nothing else.
void retire(std::function<void()> end);
// Returns once nothing is left that was retired.
void await_retired();

}  // namespace kvxfer
