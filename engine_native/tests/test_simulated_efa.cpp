// The double of EFA's NICs (simulated_efa.hpp) keeps the rules that it names.
#include "conformance.hpp"
#include "ofi_bench.hpp"
#include "simulated_efa.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

EngineOptions two_nics() {
  EngineOptions options = options_for("efa", "bench");
  options.ofi_endpoints = 2;
  return options;
}

}  // namespace

TEST_CASE("EFA's double: a closed endpoint leaves no completions, and none follow") {
  OfiBench bench(two_nics(), {.use = FabricUse::required, .library = simulated_efa().library()});
  const auto source = bench.region(kPage);
  const auto destination = bench.region(kPage);
  const Imm imm = good(bench.counters.allocate());
  auto ends = bench.join(0);
  const auto key = bench.key_for(0, destination);
  simulated_efa().hold(true);
  const auto unread = bench.post(*ends.writer, source, key, 8, 64, imm);
  simulated_efa().hold(false);
  // All have arrived, and nobody has looked at the reader's queue.
  bench.until_polled(0, [&] { return unread->done(); });
  CHECK(unread->finished == 8);
  ends.reader.shut();
  bench.settle();
  CHECK(bench.counters.value(imm) == 0);
  CHECK(ends.reader->received().empty());
}
