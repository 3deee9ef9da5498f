// Tests that the double of EFA's NICs (simulated_efa.hpp) keeps the rules that it lists.
#include <algorithm>
#include <thread>

#include "conformance.hpp"
#include "doubles/simulated_efa.hpp"
#include "ofi/ofi_bench.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

EngineOptions two_nics() {
  EngineOptions options = options_for("efa", "bench");
  options.tuning.ofi_endpoints = 2;
  return options;
}

}  // namespace

TEST_CASE("an error of an endpoint ends its path, and any other error ends the NIC") {
  if (nics_per_engine() < 2) return;
  using ErrorOf = SimulatedEfa::ErrorOf;
  for (const auto of : {ErrorOf::endpoint, ErrorOf::device, ErrorOf::nothing}) {
    CAPTURE(of);
    TestEngine reader(options_for("efa", "reader"));
    TestEngine one(options_for("efa", "one"));
    TestEngine other(options_for("efa", "other"));
    const PeerId from_one = one.connect_to(reader);
    const PeerId from_other = other.connect_to(reader);
    const auto write = [&](TestEngine& writer, PeerId to) {
      write_and_count(writer, to, reader, good(writer->allocate(kPage)),
                      good(reader->allocate(kPage)), {.length = kPage});
    };
    write(one, from_one);
    write(other, from_other);
    const std::size_t closed = simulated_efa().ends_closed();
    const std::string nic = reader->nics().front().name;
    simulated_efa().report_error(nic.substr(0, nic.find('/')), of);
    // The ends of one path, or of both peers' paths of the NIC.
    const std::size_t ends = of == ErrorOf::endpoint ? 2 : 4;
    while (simulated_efa().ends_closed() < closed + ends) std::this_thread::yield();
    const auto told = reader->drain();
    const bool nic_down = std::any_of(told.begin(), told.end(), [](const Completion& completion) {
      return completion.kind == Completion::Kind::notice;
    });
    CHECK(nic_down == (of != ErrorOf::endpoint));
    write(one, from_one);
    write(other, from_other);
    CHECK(simulated_efa().ends_closed() == closed + ends);
  }
}

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
  // All writes have arrived, and the reader has not polled its queue.
  bench.until_polled(0, [&] { return unread->done(); });
  CHECK(unread->finished == 8);
  ends.reader.shut();
  bench.settle();
  CHECK(bench.counters.value(imm) == 0);
  CHECK(ends.reader->received().empty());
}
