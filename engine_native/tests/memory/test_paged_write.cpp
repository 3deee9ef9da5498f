#include <cstring>

#include "fabric/local/page_copy.hpp"
#include "paged_write.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

Result<std::vector<WireWrite>> plan(const PagedWrite& pages, std::uint64_t size) {
  std::vector<WireWrite> writes;
  if (auto good = plan_pages(pages, size, size, writes); !good) return good.error();
  return writes;
}

Result<std::vector<WireWrite>> plan(std::vector<std::int64_t> from, std::vector<std::int64_t> to,
                                    std::uint64_t page, std::uint64_t stride = 0,
                                    std::uint64_t size = 1 << 20) {
  return plan({.page_length = page,
               .source_pages = from,
               .destination_pages = to,
               .source_stride = stride ? stride : page,
               .destination_stride = stride ? stride : page},
              size);
}

}  // namespace

TEST_CASE("neighbours on both sides become one write") {
  CHECK(good(plan({3, 4, 5, 9}, {7, 8, 9, 10}, 100)).size() == 2);
  CHECK(good(plan({3, 4, 5}, {7, 9, 10}, 100)).size() == 2);
  CHECK(good(plan({3, 4, 5}, {9, 8, 7}, 100)).size() == 3);
  CHECK(good(plan({3, 4, 5}, {7, 8, 9}, 100, 128)).size() == 3);
}

TEST_CASE("no write is longer than the limit, and the writes cover the pages exactly") {
  Random random;
  CAPTURE(random.seed);
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t page = 1 + random.below(3 * kMaxWriteBytes);
    const std::size_t count = 1 + random.below(20);
    std::vector<std::int64_t> from(count), to(count);
    for (std::size_t i = 0; i < count; ++i) {
      from[i] =
          i > 0 && random.below(2) ? from[i - 1] + 1 : static_cast<std::int64_t>(random.below(50));
      to[i] =
          i > 0 && random.below(2) ? to[i - 1] + 1 : static_cast<std::int64_t>(random.below(50));
    }
    const auto writes = good(plan(from, to, page, page, page * 100));
    std::size_t i = 0;
    std::uint64_t done = 0;  // bytes of page i
    for (const WireWrite& write : writes) {
      CHECK(write.length <= kMaxWriteBytes);
      for (std::uint64_t at = 0; at < write.length;) {
        REQUIRE(i < count);
        CHECK(write.source + at == static_cast<std::uint64_t>(from[i]) * page + done);
        CHECK(write.destination + at == static_cast<std::uint64_t>(to[i]) * page + done);
        const std::uint64_t part = std::min<std::uint64_t>(page - done, write.length - at);
        at += part;
        done += part;
        if (done == page) {
          done = 0;
          ++i;
        }
      }
    }
    CHECK(i == count);
  }
}

TEST_CASE("neighbours are recognised by their bytes, with any strides and offsets") {
  Random random;
  CAPTURE(random.seed);
  for (int round = 0; round < 500; ++round) {
    const std::uint64_t page = 1 + random.below(8);
    const std::uint64_t source_stride = random.below(10);
    const std::uint64_t destination_stride = random.below(10);
    const std::uint64_t source_offset = random.below(3);
    const std::uint64_t destination_offset = random.below(3);
    std::vector<std::int64_t> from{50}, to{50};
    while (from.size() < 30) {
      from.push_back(from.back() + static_cast<std::int64_t>(random.below(4)) - 1);
      to.push_back(to.back() + static_cast<std::int64_t>(random.below(4)) - 1);
    }
    std::vector<WireWrite> joined;
    for (std::size_t i = 0; i < from.size(); ++i) {
      const WireWrite next{
          source_offset + static_cast<std::uint64_t>(from[i]) * source_stride,
          destination_offset + static_cast<std::uint64_t>(to[i]) * destination_stride,
          static_cast<std::uint32_t>(page)};
      if (!joined.empty() && joined.back().source + joined.back().length == next.source &&
          joined.back().destination + joined.back().length == next.destination) {
        joined.back().length += next.length;
      } else {
        joined.push_back(next);
      }
    }
    const auto writes = good(plan({.page_length = page,
                                   .source_pages = from,
                                   .destination_pages = to,
                                   .source_stride = source_stride,
                                   .destination_stride = destination_stride,
                                   .source_offset = source_offset,
                                   .destination_offset = destination_offset},
                                  4096));
    REQUIRE(writes.size() == joined.size());
    for (std::size_t i = 0; i < writes.size(); ++i) {
      CHECK(writes[i].source == joined[i].source);
      CHECK(writes[i].destination == joined[i].destination);
      CHECK(writes[i].length == joined[i].length);
    }
  }
}

TEST_CASE("the error names a page outside its region") {
  const std::int64_t last = (1 << 20) / 4096 - 1;
  CHECK(plan({last}, {last}, 4096));
  for (const auto& [from, to] : {std::pair{last + 1, last},
                                 {last, last + 1},
                                 {-1L, 0L},
                                 {0L, -1L},
                                 {INT64_MAX, 0L},
                                 {0L, INT64_MIN}}) {
    const auto refused = plan({0, from}, {0, to}, 4096);
    REQUIRE(!refused);
    CHECK(refused.error().code == Errc::out_of_bounds);
    CHECK(refused.error().text.find("position 1") != std::string::npos);
  }
  CHECK(!plan({0}, {0}, (1 << 20) + 1));
}

TEST_CASE("the error names the first of several pages outside, even within a run of neighbours") {
  Random random;
  CAPTURE(random.seed);
  const std::int64_t pages = 100;
  for (int round = 0; round < 500; ++round) {
    const auto run = [&] {
      std::vector<std::int64_t> list;
      while (list.size() < 60) {
        const bool next = !list.empty() && random.below(10) > 0;
        list.push_back(next ? list.back() + 1 : static_cast<std::int64_t>(random.below(110)) - 5);
      }
      return list;
    };
    const auto from = run();
    const auto to = run();
    const auto outside = [&](std::int64_t page) { return page < 0 || page >= pages; };
    std::string expected;
    for (std::size_t i = 0; i < from.size() && expected.empty(); ++i) {
      const auto named = [&](const char* side, std::int64_t page) {
        return std::string(side) + " page " + std::to_string(page) + " (position " +
               std::to_string(i) + " of the list)";
      };
      if (outside(to[i])) expected = named("destination", to[i]);
      if (outside(from[i])) expected = named("source", from[i]);
    }
    const auto planned = plan(from, to, 64, 64, 64 * pages);
    REQUIRE(static_cast<bool>(planned) == expected.empty());
    if (!planned) CHECK(planned.error().text.starts_with(expected));
  }
}

TEST_CASE("a page outside is found between two that are inside") {
  // Pages of 64 bytes with a gap, without one, and overlapping.
  for (const std::uint64_t stride : {96u, 64u, 32u}) {
    for (const std::int64_t far : {INT64_MIN, INT64_MAX, INT64_MIN + 1, INT64_MAX - 1}) {
      CHECK(!plan({0, far, 0}, {0, far, 0}, 64, stride));
      CHECK(!plan({1, far, 1}, {1, far, 1}, 64, stride));
      CHECK(!plan({0, far, 0}, {0, 1, 2}, 64, stride));
    }
  }
}

TEST_CASE("lists of unequal length, no pages, and no bytes are refused") {
  CHECK(plan({0, 1}, {0}, 8).error().code == Errc::invalid_argument);
  CHECK(plan({}, {}, 8).error().code == Errc::invalid_argument);
  CHECK(plan({0}, {0}, 0, 8).error().code == Errc::invalid_argument);
}

TEST_CASE("a single write is checked against both regions without overflow") {
  const auto single = [](std::uint64_t from, std::uint64_t to, std::uint64_t length) {
    std::vector<WireWrite> writes;
    return plan_single({.source_offset = from, .destination_offset = to, .length = length}, 1000,
                       1000, 1, writes);
  };
  CHECK(single(0, 0, 1000));
  CHECK(single(1, 0, 1000).error().code == Errc::out_of_bounds);
  CHECK(single(0, 1, 1000).error().code == Errc::out_of_bounds);
  CHECK(single(UINT64_MAX, 0, 2).error().code == Errc::out_of_bounds);
  CHECK(single(0, 2, UINT64_MAX).error().code == Errc::out_of_bounds);
  CHECK(single(0, 0, 0).error().code == Errc::invalid_argument);
}

TEST_CASE("groups end at 32 writes, at 128 KiB, and at a long write") {
  const auto groups = [](const std::vector<std::uint32_t>& lengths) {
    std::vector<WireWrite> writes;
    for (const std::uint32_t length : lengths) writes.push_back({.length = length});
    const std::uint64_t count = form_groups(writes);
    std::vector<std::size_t> sizes(1);
    for (const WireWrite& write : writes) {
      ++sizes.back();
      if (write.grouped == 0) sizes.push_back(0);
    }
    CHECK(sizes.back() == 0);  // the last write ends a group
    sizes.pop_back();
    CHECK(sizes.size() == count);
    return sizes;
  };
  using Sizes = std::vector<std::size_t>;
  using Lengths = std::vector<std::uint32_t>;
  CHECK(groups(Lengths(1, 0)) == Sizes{1});
  CHECK(groups(Lengths(70, 4096)) == Sizes{32, 32, 6});
  CHECK(groups(Lengths(5, 65535)) == Sizes{2, 2, 1});
  CHECK(groups(Lengths(3, 65536)) == Sizes{1, 1, 1});
  CHECK(groups({8, 8, 65536, 8, 1u << 20, 8, 8}) == Sizes{2, 1, 1, 1, 2});
}

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
