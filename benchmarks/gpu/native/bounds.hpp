// Bandwidths of the hardware without an engine, in bytes per second.
#pragma once

#include <cstddef>

#include "receiver.hpp"

namespace kvxfer::gpu_bench {

struct Bounds {
  double device_copy;  // cuMemcpyDtoDAsync of kRequestBytes
  double to_device;    // from pinned memory
  double to_host;      // to pinned memory
  double tcp;          // one socket
};
Bounds measure_bounds(Receiver& receiver);

// Measures the copy kernel alone: kRequestBytes in such pages, scattered on both sides.
double measure_kernel(std::size_t page_bytes);

}  // namespace kvxfer::gpu_bench
