#include "pages.hpp"

#include <algorithm>
#include <numeric>
#include <random>

namespace kvxfer::gpu_bench {

PageLists draw(std::size_t page_bytes, std::size_t request_bytes) {
  std::mt19937_64 random(page_bytes);
  const auto list = [&] {
    std::vector<std::int64_t> pages(kPoolBytes / page_bytes);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    pages.resize(request_bytes / page_bytes);
    return pages;
  };
  PageLists lists{.source = list(), .destination = {}};
  lists.destination = list();
  return lists;
}

std::vector<std::uint64_t> source_words() {
  std::vector<std::uint64_t> words(kPoolBytes / sizeof(std::uint64_t));
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = word(i);
  return words;
}

std::size_t wrong_words(const std::vector<std::uint64_t>& pool, const PageLists& pages,
                        std::size_t page_bytes) {
  const std::size_t words = page_bytes / sizeof(std::uint64_t);
  std::size_t wrong = 0;
  for (std::size_t p = 0; p < pages.source.size(); ++p) {
    const auto from = static_cast<std::size_t>(pages.source[p]) * words;
    const auto to = static_cast<std::size_t>(pages.destination[p]) * words;
    for (std::size_t i = 0; i < words; ++i) {
      if (pool[to + i] != word(from + i)) ++wrong;
    }
  }
  return wrong;
}

}  // namespace kvxfer::gpu_bench
