// The data that both processes of the benchmark agree on: the pool's bytes and the page lists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvxfer::gpu_bench {

inline constexpr std::size_t kRequestBytes = std::size_t{1} << 30;
inline constexpr std::size_t kPoolBytes = 2 * kRequestBytes;

// Both lists are in random order, so pages are neighbours on both sides only by chance.
struct PageLists {
  std::vector<std::int64_t> source;
  std::vector<std::int64_t> destination;
};
PageLists draw(std::size_t page_bytes, std::size_t request_bytes);

// Returns word i of a source pool.
constexpr std::uint64_t word(std::uint64_t i) { return (i + 1) * 0x9e37'79b9'7f4a'7c15u; }
std::vector<std::uint64_t> source_words();
// Returns how many words of the destination pool are not what the request brings.
std::size_t wrong_words(const std::vector<std::uint64_t>& pool, const PageLists& pages,
                        std::size_t page_bytes);

}  // namespace kvxfer::gpu_bench
