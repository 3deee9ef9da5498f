#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "timing.hpp"

namespace kvxfer::probes {

// Raw TCP over one connected, blocking socket: what the host's TCP gives without an engine. Both
// ends call the function of their side with the same numbers; the receiving side is the one that
// starts each exchange, so neither has to be first.

/// Sends `nbytes` out of `buffer`, `times` times. Returns for each time the nanoseconds from the
/// first send until the receiver has read and acknowledged everything.
std::vector<std::int64_t> tcp_send(int fd, std::size_t nbytes, std::size_t times,
                                   std::span<const std::byte> buffer);

/// Receives `nbytes` into `buffer` and acknowledges them, `times` times.
void tcp_receive(int fd, std::size_t nbytes, std::size_t times, std::span<std::byte> buffer);

/// Sends `count` messages of `message_bytes`, each after the former was acknowledged and `gap_ns`
/// have passed. Returns the time at which each was given to the kernel.
std::vector<std::int64_t> tcp_ping(int fd, std::size_t message_bytes, std::size_t count,
                                   std::int64_t gap_ns, Wait wait);

/// The receiving side of tcp_ping. Returns the time at which each message had arrived whole.
std::vector<std::int64_t> tcp_pong(int fd, std::size_t message_bytes, std::size_t count, Wait wait);

}  // namespace kvxfer::probes
