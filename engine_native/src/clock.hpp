// CLOCK_MONOTONIC in nanoseconds: the same clock as Python's time.monotonic_ns().
#pragma once

#include <time.h>

#include <cstdint>

namespace kvxfer {

inline std::uint64_t now_ns() {
  timespec ts{};
  ::clock_gettime(CLOCK_MONOTONIC, &ts);
  return static_cast<std::uint64_t>(ts.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(ts.tv_nsec);
}

}  // namespace kvxfer
