#include "cuda/gpus.hpp"
#include "placement.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

static constexpr PeerId kPlacedWriter = 1;

namespace {

struct Receiver {
  std::unique_ptr<CompletionQueue> completions = good(CompletionQueue::create());
  ImmCounters counters{*completions};
  RegionTable regions;
  EngineStats stats;
  std::uint64_t activity = 0;
  cuda::Gpus gpus;
  ReceiveContext receive_context{regions, counters, stats, activity, gpus};
  RegionPtr region = good(MemoryRegion::allocate({}, 1000));
  Imm imm = good(counters.allocate());
  Receiver() { regions.insert(region); }
};

}  // namespace

TEST_CASE("a granted batch gets its targets and counts once it is finished") {
  Receiver r;
  Placement placement(r.receive_context, kPlacedWriter, r.region->key(), r.imm);
  CHECK(placement.target(0, 1000) == r.region->address());
  CHECK(placement.target(999, 1) == r.region->address() + 999);
  CHECK(r.counters.value(r.imm) == 0);
  placement.finish(2, 1, 1001);
  CHECK(r.counters.value(r.imm) == 1);
  CHECK(r.stats.bytes_received == 1001);
}

TEST_CASE("a batch may name its immediate and count for nothing") {
  Receiver r;
  good(r.counters.expect(r.imm, 1));
  Placement counted(r.receive_context, kPlacedWriter, r.region->key(), r.imm);
  counted.finish(1, 1, 10);
  Placement uncounted(r.receive_context, kPlacedWriter, r.region->key(), r.imm);
  CHECK(uncounted.target(0, 10) == r.region->address());
  uncounted.finish(1, 0, 10);
  CHECK(r.counters.value(r.imm) == 1);
  CHECK(r.stats.bytes_received == 20);
  CHECK(r.counters.release(r.imm) == ImmCounters::Released::complete);
}

TEST_CASE("offsets that overflow do not pass the bounds check") {
  Receiver r;
  for (const auto& [offset, length] : {std::pair<std::uint64_t, std::uint32_t>{1000, 1},
                                       {1, 1000},
                                       {UINT64_MAX, 2},
                                       {0, UINT32_MAX}}) {
    Placement placement(r.receive_context, kPlacedWriter, r.region->key(), r.imm);
    CHECK(placement.target(offset, length) == 0);
    CHECK(placement.status() == Errc::out_of_bounds);
    placement.finish(1, 1, length);
    CHECK(r.counters.value(r.imm) == 0);
  }
}

TEST_CASE("a batch that is revoked half-way has no target left and is not counted") {
  Receiver r;
  Placement by_counter(r.receive_context, kPlacedWriter, r.region->key(), r.imm);
  CHECK(by_counter.target(0, 10));
  by_counter.revoke_counter(r.imm + 1);
  CHECK(by_counter.status() == Errc::ok);
  by_counter.revoke_counter(r.imm);
  CHECK(!by_counter.target(0, 10));
  by_counter.finish(1, 1, 10);
  CHECK(by_counter.status() == Errc::stale_counter);

  Placement by_region(r.receive_context, kPlacedWriter, r.region->key(), std::nullopt);
  CHECK(by_region.target(0, 10));
  by_region.revoke_region(r.region->key());
  CHECK(!by_region.target(0, 10));
  CHECK(by_region.status() == Errc::unknown_region);
  CHECK(r.counters.value(r.imm) == 0);
  CHECK(r.stats.writes_refused.total == 1);
}
