#include <cstring>

#include "fabric/local/page_copy.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

TEST_CASE("copies of any length and alignment are exact and touch nothing else") {
  Random random;
  CAPTURE(random.seed);
  constexpr std::size_t kSize = 200000;
  std::vector<std::byte> source(kSize), destination(kSize), expected(kSize);
  random.fill(source.data(), kSize);
  for (int round = 0; round < 300; ++round) {
    random.fill(destination.data(), 64);
    expected = destination;
    std::vector<local::PageCopy> copies;
    std::size_t to = random.below(64);
    while (true) {
      const std::size_t length = random.below(random.below(2) ? 300 : 9000);
      if (to + length > kSize) break;
      const std::size_t from = random.below(kSize - length);
      copies.push_back({&source[from], &destination[to], length});
      std::memcpy(&expected[to], &source[from], length);
      to += length + random.below(64);
      if (random.below(40) == 0) break;
    }
    local::copy_pages(copies);
    REQUIRE(destination == expected);
  }
}
