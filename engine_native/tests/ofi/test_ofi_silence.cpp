// EFA whose traffic is dropped without an error, as by a security group, while the control stream
// works: writes take another way, and a notice says why.
#include <algorithm>
#include <functional>

#include "doubles/simulated_efa.hpp"
#include "ofi/ofi_bench.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

TEST_SUITE_BEGIN("ofi");

namespace {

constexpr std::size_t kSilentBytes = std::size_t{1} << 20;

EngineOptions silent_options(const std::string& name, bool tcp) {
  EngineOptions options = options_for("efa", name);
  options.tcp = tcp;
  options.tuning.path_timeout = std::chrono::milliseconds(300);
  return options;
}

bool names(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct SilentHosts {
  explicit SilentHosts(bool tcp)
      : ours(silent_options("writer", tcp)), theirs(silent_options("reader", tcp)) {}
  // Swallows traffic of NICs `first` to `end` of both hosts, in one direction or in both.
  void swallow(bool there, bool back, bool swallows, std::size_t first = 0, std::size_t end = 99) {
    for (std::size_t n = first; n < std::min(end, ours.nics.size()); ++n) {
      for (std::size_t k = first; k < std::min(end, theirs.nics.size()); ++k) {
        if (there) simulated_efa().swallow(ours.nics[n], theirs.nics[k], swallows);
        if (back) simulated_efa().swallow(theirs.nics[k], ours.nics[n], swallows);
      }
    }
  }

  EngineOptions ours;
  EngineOptions theirs;
};

// Writes from one engine to another that it is connected to, and checks the bytes.
void check_written(TestEngine& from, PeerId to, TestEngine& into) {
  const auto source = good(from->allocate(kSilentBytes));
  const auto destination = good(into->allocate(kSilentBytes));
  std::fill_n(source->host(), kSilentBytes, std::byte{0x5a});
  write_and_count(from, to, into, source, destination, {.length = kSilentBytes});
  CHECK(std::count(destination->host(), destination->host() + kSilentBytes, std::byte{0x5a}) ==
        kSilentBytes);
}

Completion notice_of(TestEngine& engine, const std::string& nic) {
  return engine.await([&](const Completion& c) {
    return c.kind == Kind::notice && names(c.text, "NIC " + nic + "/0 ");
  });
}

}  // namespace

TEST_CASE(
    "a double of EFA swallows a direction: nothing arrives, or no sender learns of arrivals") {
  for (const bool arrives : {false, true}) {
    CAPTURE(arrives);
    EngineOptions options = options_for("efa", "bench");
    if (options.nics.size() < 2) return;
    options.tuning.ofi_endpoints = 2;
    OfiBench bench(options, {.use = FabricUse::required, .library = simulated_efa().library()});
    const auto source = bench.region(4 * kPage);
    const auto destination = bench.region(4 * kPage);
    std::fill_n(source->host(), source->size(), std::byte{0x77});
    auto ends = bench.join(0);
    const std::string& first = options.nics.front();
    const std::string& last = options.nics[1];
    const auto swallow = [&](bool on) {
      simulated_efa().swallow(arrives ? last : first, arrives ? first : last, on);
    };
    swallow(true);
    const std::size_t before = simulated_efa().swallowed();
    const Imm imm = good(bench.counters.allocate());
    const auto operation =
        bench.post(*ends.writer, source, bench.key_for(0, destination), 4, kPage, imm);
    bench.until([&] { return simulated_efa().swallowed() == before + 4; });
    if (arrives) bench.until([&] { return bench.counters.value(imm) == 4; });
    bench.settle();
    CHECK(bench.counters.value(imm) == (arrives ? 4 : 0));
    CHECK(count_other_than(destination, std::byte{0}) == (arrives ? 4 * kPage : 0));
    CHECK(operation->outstanding == 4);
    CHECK(bench.lost.empty());
    swallow(false);
  }
}

TEST_CASE("tcp takes over, in both directions, if EFA's traffic is dropped in one or in both") {
  for (const auto& [there, back] : {std::pair{true, true}, {true, false}, {false, true}}) {
    CAPTURE(there);
    CAPTURE(back);
    SilentHosts hosts(true);
    hosts.ours.operation_timeout = hosts.theirs.operation_timeout = std::chrono::seconds(20);
    TestEngine writer(hosts.ours);
    TestEngine reader(hosts.theirs);
    hosts.swallow(there, back, true);
    const PeerId to_reader = writer.connect_to(reader);
    const PeerId to_writer = reader.await(Kind::peer_up).peer;
    check_written(writer, to_reader, reader);
    check_written(reader, to_writer, writer);
    for (const std::string& nic : hosts.ours.nics) {
      const std::string text = notice_of(writer, nic).text;
      CHECK_MESSAGE(names(text, "'reader'"), text);
      CHECK_MESSAGE(names(text, "security group"), text);
    }
    for (const std::string& nic : hosts.theirs.nics) {
      const std::string text = notice_of(reader, nic).text;
      CHECK_MESSAGE(names(text, "'writer'"), text);
      CHECK_MESSAGE(names(text, "security group"), text);
    }
    // When the group permits the traffic again, both NICs are used without a restart.
    hosts.swallow(there, back, false);
    const auto source = good(writer->allocate(kPage));
    const auto destination = good(reader->allocate(kPage));
    for (std::uint32_t nic = 0; nic < hosts.ours.nics.size(); ++nic) {
      const auto pinned =
          good(writer->write(to_reader, source, destination->descriptor(), {.length = kPage},
                             {.timeout = kDeadline, .nic = nic}));
      const auto done = writer.await(Kind::write, pinned.id);
      CHECK_MESSAGE(done.code == Errc::ok, done.text);
    }
  }
}

TEST_CASE("a notice names a rail that never works, and the others are used") {
  if (nics_per_engine() < 2) return;
  for (const bool back : {true, false}) {
    CAPTURE(back);
    SilentHosts hosts(false);
    TestEngine writer(hosts.ours);
    TestEngine reader(hosts.theirs);
    hosts.swallow(true, back, true, 1, 2);
    const PeerId to_reader = writer.connect_to(reader);
    const PeerId to_writer = reader.await(Kind::peer_up).peer;
    check_written(writer, to_reader, reader);
    check_written(reader, to_writer, writer);
    const std::string text = notice_of(writer, hosts.ours.nics[1]).text;
    CHECK_MESSAGE(names(text, hosts.theirs.nics[1]), text);
    hosts.swallow(true, back, false, 1, 2);
  }
}

TEST_CASE("without another way to the peer a connect fails, and the error says what to check") {
  SilentHosts hosts(false);
  TestEngine writer(hosts.ours);
  TestEngine reader(hosts.theirs);
  hosts.swallow(true, false, true);
  const OperationId id = writer->connect(reader->address(), std::chrono::seconds(3));
  const auto failed = writer.await(Kind::connect, id);
  CHECK(failed.code != Errc::ok);
  CHECK_MESSAGE(names(failed.text, "security group"), failed.text);
  hosts.swallow(true, false, false);
}

TEST_SUITE_END();
