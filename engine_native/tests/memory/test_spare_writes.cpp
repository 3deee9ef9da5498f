#include "spare_writes.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

std::vector<WireWrite> with_room(std::size_t count) {
  std::vector<WireWrite> list(count);
  REQUIRE(list.capacity() == count);
  return list;
}

}  // namespace

TEST_CASE("a list's memory is used again, once, if it is large enough") {
  SpareWrites spare;
  auto list = with_room(SpareWrites::kFewest);
  const WireWrite* const memory = list.data();
  spare.keep(std::move(list));
  CHECK(spare.take(SpareWrites::kFewest + 1).capacity() == 0);
  const auto taken = spare.take(SpareWrites::kFewest);
  CHECK(taken.data() == memory);
  CHECK(taken.empty());
  CHECK(spare.take(SpareWrites::kFewest).capacity() == 0);
}

TEST_CASE("short lists are neither kept nor reused") {
  SpareWrites spare;
  spare.keep(with_room(SpareWrites::kFewest - 1));
  CHECK(spare.take(SpareWrites::kFewest - 1).capacity() == 0);
  spare.keep(with_room(SpareWrites::kFewest));
  CHECK(spare.take(1).capacity() == 0);
}

TEST_CASE("the kept lists are bounded, and the oldest makes room") {
  SpareWrites spare;
  spare.keep(with_room(SpareWrites::kMost + 1));
  CHECK(spare.take(SpareWrites::kFewest).capacity() == 0);
  spare.keep(with_room(SpareWrites::kMost / 2));
  spare.keep(with_room(SpareWrites::kFewest));
  spare.keep(with_room(SpareWrites::kMost / 2));
  CHECK(spare.take(SpareWrites::kMost / 2).capacity() == SpareWrites::kMost / 2);
  CHECK(spare.take(SpareWrites::kMost / 2).capacity() == 0);
  CHECK(spare.take(SpareWrites::kFewest).capacity() == SpareWrites::kFewest);
}
