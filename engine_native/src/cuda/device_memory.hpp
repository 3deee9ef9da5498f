// What CUDA says of an address, where this process has CUDA. Nothing here is built with it or loads
// it: a process that has not loaded its driver has no device memory.
#pragma once

#include <optional>

namespace kvxfer::cuda {

// The device, by CUDA's number, whose memory is at this address. None where the processor may touch
// it: host memory, pinned or not, and managed memory.
std::optional<int> device_at(const void* address);

}  // namespace kvxfer::cuda
