#pragma once

#include <chrono>
#include <cstdint>

namespace kvxfer::probes {

/// CLOCK_MONOTONIC in nanoseconds: the clock of Python's time.monotonic_ns(), the same in all
/// processes of a host.
inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// A probe waits this long for the other side before it gives up with ETIMEDOUT.
inline constexpr std::int64_t kPatienceNs = 10'000'000'000;

/// The way in which a side waits for the other.
enum class Wait { kSpin, kSleep };

}  // namespace kvxfer::probes
