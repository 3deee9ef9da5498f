#include <set>

#include "imm_counter.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

static constexpr PeerId kWriter = 1;

namespace {

struct Counters {
  std::unique_ptr<CompletionQueue> completions = good(CompletionQueue::create());
  ImmCounters counters{*completions};
};

}  // namespace

TEST_CASE("arrivals before expect are kept") {
  Counters c;
  const Imm imm = good(c.counters.allocate());
  c.counters.add(imm, kWriter, 3);
  CHECK(c.completions->drain().empty());
  good(c.counters.expect(imm, 5));
  c.counters.add(imm, kWriter, 2);
  const auto completions = c.completions->drain();
  REQUIRE(completions.size() == 1);
  CHECK(completions[0].id == imm);
  CHECK(completions[0].code == Errc::ok);
}

TEST_CASE("more arrivals than announced are an error, not a completion") {
  Counters c;
  const Imm imm = good(c.counters.allocate());
  c.counters.add(imm, kWriter, 6);
  good(c.counters.expect(imm, 5));
  const auto completions = c.completions->drain();
  REQUIRE(completions.size() == 1);
  CHECK(completions[0].code == Errc::protocol_error);
}

TEST_CASE("a new total replaces the old one, and its completion if that was not taken yet") {
  Counters c;
  const Imm imm = good(c.counters.allocate());
  const Imm other = good(c.counters.allocate());
  good(c.counters.expect(other, 0));
  good(c.counters.expect(imm, 1));
  c.counters.add(imm, kWriter, 3);  // more than the old total
  good(c.counters.expect(imm, 3));
  auto completions = c.completions->drain();
  REQUIRE(completions.size() == 2);
  CHECK(completions[0].id == other);
  CHECK(completions[1].id == imm);
  CHECK(completions[1].code == Errc::ok);
  good(c.counters.expect(imm, 4));
  good(c.counters.expect(imm, 5));  // before the old total is reached
  c.counters.add(imm, kWriter, 1);
  CHECK(c.completions->drain().empty());
  c.counters.add(imm, kWriter, 1);
  CHECK(c.completions->drain().size() == 1);
}

TEST_CASE("a counter is complete only while its last total is reached") {
  using Released = ImmCounters::Released;
  Counters c;
  const auto released_after = [&](std::uint64_t first, std::uint64_t second) {
    const Imm imm = good(c.counters.allocate());
    c.counters.add(imm, kWriter, 1);
    good(c.counters.expect(imm, first));
    good(c.counters.expect(imm, second));
    return c.counters.release(imm);
  };
  CHECK(released_after(1, 2) == Released::pending);  // another write is expected
  CHECK(released_after(2, 1) == Released::complete);
}

TEST_CASE("an immediate of a released counter is never counted again") {
  Counters c;
  std::set<Imm> used;
  for (int i = 0; i < 5000; ++i) {
    const Imm imm = good(c.counters.allocate());
    CHECK(imm != 0);
    CHECK(used.insert(imm).second);
    for (const Imm old : {*used.begin(), *used.rbegin()}) {
      if (old != imm) c.counters.add(old, kWriter, 1);
    }
    CHECK(c.counters.value(imm) == 0);
    c.counters.release(imm);
    CHECK(!c.counters.live(imm));
    CHECK(!c.counters.expect(imm, 1));
  }
}

TEST_CASE("releasing a counter ends the wait for it with an error") {
  Counters c;
  const Imm imm = good(c.counters.allocate());
  good(c.counters.expect(imm, 5));
  c.counters.release(imm);
  const auto completions = c.completions->drain();
  REQUIRE(completions.size() == 1);
  CHECK(completions[0].code == Errc::stale_counter);
}

TEST_CASE("the error says when all counters are in use") {
  Counters c;
  for (int i = 0; i < 65536; ++i) good(c.counters.allocate());
  const auto refused = c.counters.allocate();
  REQUIRE(!refused);
  CHECK(refused.error().code == Errc::out_of_memory);
}
