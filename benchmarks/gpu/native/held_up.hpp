// Delays of the engine thread.
#pragma once

namespace kvxfer::gpu_bench {

// Returns the longest time, in nanoseconds, until the engine thread answered a question, while it
// copied and another thread launched kernels for the first time behind a stream that waits.
double measure_held_up();

}  // namespace kvxfer::gpu_bench
