// A checksum over scattered runs of memory that does not depend on the order in which they lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvxfer/error.hpp"

namespace kvxfer {

// The sum, modulo 2^64, of XXH3 (64 bits, seeded with its number in `numbers`) of each run of
// `length` bytes at `memory[offsets[i]]`. The number keeps two runs that have changed places from
// having the same sum; the sum lets both sides take the runs in their own order.
Result<std::uint64_t> page_checksum(std::span<const std::byte> memory,
                                    std::span<const std::int64_t> offsets,
                                    std::span<const std::int64_t> numbers, std::size_t length);

}  // namespace kvxfer
