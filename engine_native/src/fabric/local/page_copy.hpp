// Copies between pages that lie scattered over large pools.
#pragma once

#include <cstddef>
#include <span>

namespace kvxfer::local {

struct PageCopy {
  const std::byte* source;
  std::byte* destination;
  std::size_t length;
};

// Copies with non-temporal stores if the processor has them (AVX2): another process reads the pages
// next, and not reading them into the cache first saves a third of the memory traffic. The head of
// the next page is fetched while the current one is copied.
void copy_pages(std::span<const PageCopy> copies);

}  // namespace kvxfer::local
