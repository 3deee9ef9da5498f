#include "fabric/nic/revoked_counters.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

Imm at_generation(std::uint32_t generation) { return generation << 16 | 7u; }

}  // namespace

TEST_CASE("a revoked counter, and those of its slot before it, are revoked; later ones are live") {
  RevokedCounters revoked;
  CHECK(!revoked.contains(at_generation(100), 0));
  revoked.add(at_generation(100), 0);
  CHECK(revoked.contains(at_generation(100), 0));
  CHECK(revoked.contains(at_generation(99), 0));
  CHECK(revoked.contains(at_generation(1), 0));
  CHECK(!revoked.contains(at_generation(101), 0));
  CHECK(!revoked.contains(at_generation(100) + 1, 0));  // another slot
  // Generations wrap around.
  revoked.add(at_generation(3), 0);
  CHECK(revoked.contains(at_generation(65'535), 0));
  CHECK(!revoked.contains(at_generation(4), 0));
}

TEST_CASE("a live counter is not taken for a revoked one, however often its slot was used") {
  RevokedCounters revoked;
  revoked.add(at_generation(100), 0);
  CHECK(!revoked.contains(at_generation(32'868), 0));
  CHECK(!revoked.contains(at_generation(32'900), 0));
  // Even if the numbers have wrapped around, which takes longer than they are remembered.
  const std::uint64_t later = RevokedCounters::kRememberedNs + 1;
  for (std::uint32_t generation = 1; generation <= 65'535; ++generation) {
    REQUIRE(!revoked.contains(at_generation(generation), later));
  }
}
