#include "page_checksum.hpp"

#include <string>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvxfer {

Result<std::uint64_t> page_checksum(std::span<const std::byte> memory,
                                    std::span<const std::int64_t> offsets,
                                    std::span<const std::int64_t> numbers, std::size_t length) {
  if (offsets.size() != numbers.size()) {
    return Error{Errc::invalid_argument, std::to_string(offsets.size()) + " runs with " +
                                             std::to_string(numbers.size()) +
                                             " numbers; pass one for each"};
  }
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const auto offset = static_cast<std::size_t>(offsets[i]);
    if (length > memory.size() || offset > memory.size() - length) {
      return Error{Errc::out_of_bounds, "a run of " + std::to_string(length) + " bytes at " +
                                            std::to_string(offsets[i]) + " leaves its region of " +
                                            std::to_string(memory.size()) + " bytes"};
    }
    sum += XXH3_64bits_withSeed(memory.data() + offset, length,
                                static_cast<std::uint64_t>(numbers[i]));
  }
  return sum;
}

}  // namespace kvxfer
