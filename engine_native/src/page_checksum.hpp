// A checksum over scattered runs of memory that does not depend on the order in which they lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvxfer/error.hpp"

namespace kvxfer {

// Returns the sum, modulo 2^64, of XXH3 (64 bits, seeded with its number in `numbers`) of each run
// of `length` bytes at `memory[offsets[i]]`. The numbers make the sum differ if two runs have
// changed places; being a sum, it lets each side take the runs in its own order.
Result<std::uint64_t> page_checksum(std::span<const std::byte> memory,
                                    std::span<const std::int64_t> offsets,
                                    std::span<const std::int64_t> numbers, std::size_t length);

}  // namespace kvxfer
