#include <utility>

#include "page_checksum.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

struct Runs {
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 16);
  std::vector<std::int64_t> offsets, numbers;
  std::size_t length = 100;

  std::uint64_t sum() const { return good(page_checksum(memory, offsets, numbers, length)); }
};

Runs random_runs(Random& random) {
  Runs runs;
  random.fill(runs.memory.data(), runs.memory.size());
  for (std::int64_t number = 0; number < 20; ++number) {
    runs.offsets.push_back(number * 1000 + static_cast<std::int64_t>(random.below(800)));
    runs.numbers.push_back(number);
  }
  return runs;
}

}  // namespace

TEST_CASE("a checksum depends on every bit and place of its runs, and on nothing else") {
  Random random;
  CAPTURE(random.seed);
  for (int round = 0; round < 50; ++round) {
    Runs runs = random_runs(random);
    const std::uint64_t before = runs.sum();
    const auto at = static_cast<std::size_t>(runs.offsets[random.below(20)]);

    Runs flipped = runs;
    flipped.memory[at + random.below(runs.length)] ^= std::byte{1} << random.below(8);
    CHECK(flipped.sum() != before);

    Runs beside = runs;
    beside.memory[at + runs.length] ^= std::byte{0xff};
    CHECK(beside.sum() == before);

    Runs swapped = runs;
    std::swap(swapped.offsets[3], swapped.offsets[17]);
    CHECK(swapped.sum() != before);

    Runs reordered = runs;
    std::swap(reordered.offsets[3], reordered.offsets[17]);
    std::swap(reordered.numbers[3], reordered.numbers[17]);
    CHECK(reordered.sum() == before);
  }
}

TEST_CASE("checksums are those of XXH3") {
  // The hash of no bytes with seed 0, as xxHash publishes it.
  const std::vector<std::byte> memory(1);
  const std::vector<std::int64_t> zero{0};
  CHECK(*page_checksum(memory, zero, zero, 0) == 0x2D06800538D394C2u);
}

TEST_CASE("a checksum reads nothing outside its memory") {
  Random random;
  Runs runs = random_runs(random);
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{(1 << 16) - 99}, INT64_MIN}) {
    runs.offsets[5] = bad;
    const auto sum = page_checksum(runs.memory, runs.offsets, runs.numbers, runs.length);
    CHECK(sum.error().code == Errc::out_of_bounds);
  }
  runs.numbers.pop_back();
  CHECK(page_checksum(runs.memory, runs.offsets, runs.numbers, 1).error().code ==
        Errc::invalid_argument);
}
