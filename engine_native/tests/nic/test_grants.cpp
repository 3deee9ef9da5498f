// Ranges of memory that are granted to one peer, with one counter, until the counter is released.
#include <algorithm>
#include <cstring>
#include <thread>

#include "doubles/simulated_nic.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

constexpr std::size_t kSize = 256u << 10;
constexpr std::uint64_t kOffset = 4096;
constexpr std::uint64_t kLength = 64u << 10;

struct Granted {
  explicit Granted(Pair& connected) : pair(connected) {
    std::fill_n(source->host(), kSize, std::byte{0x5a});
    imm = good(pair.reader->allocate_counter(pair.to_writer));
    const RegionRange range{destination, kOffset, kLength};
    descriptor = good(pair.reader->grant(imm, {&range, 1})).front();
  }
  Completion write(const MrDescriptor& to, std::uint64_t length, std::optional<Imm> with) {
    const auto submitted =
        good(pair.writer->write(pair.to_reader, source, to, {.length = length}, {.imm = with}));
    return pair.writer.await(Kind::write, submitted.id);
  }
  // Returns the descriptor as a writer sees it that does not check its kind.
  MrDescriptor unmarked() const {
    MrDescriptor plain = descriptor;
    plain.imm = 0;
    return plain;
  }
  bool untouched(std::uint64_t from, std::uint64_t to) const {
    return std::all_of(destination->host() + from, destination->host() + to,
                       [](std::byte byte) { return byte == std::byte{0}; });
  }

  Pair& pair;
  RegionPtr source = good(pair.writer->allocate(kSize));
  RegionPtr destination = good(pair.reader->allocate(kSize));
  Imm imm = 0;
  MrDescriptor descriptor;
};

}  // namespace

TEST_SUITE_BEGIN("conformance");

TEST_CASE("a grant opens its range to its counter's writes, until the counter is released") {
  for (const auto& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    Granted granted(pair);
    CHECK(granted.descriptor.length == kLength);

    const auto submitted =
        good(pair.writer->write(pair.to_reader, granted.source, granted.descriptor,
                                {.length = kLength}, {.imm = granted.imm}));
    CHECK(pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
    good(pair.reader->expect(granted.imm, submitted.immediates));
    CHECK(pair.reader.await(Kind::counter, granted.imm).code == Errc::ok);
    CHECK(granted.untouched(0, kOffset));
    CHECK(granted.untouched(kOffset + kLength, kSize));
    CHECK(std::memcmp(granted.destination->host() + kOffset, granted.source->host(), kLength) == 0);

    pair.reader->release_counter(granted.imm);
    if (places_by_nic(fabric)) {
      // With some NICs the writer ends the grant, and need not confirm once all has arrived.
      good(pair.reader->send(pair.to_writer, "released"));
      pair.writer.await(Kind::message);
    }
    std::memset(granted.destination->host(), 0, kSize);
    const Imm next = good(pair.reader->allocate_counter(pair.to_writer));
    CHECK(granted.write(granted.descriptor, kLength, granted.imm).code != Errc::ok);
    CHECK(granted.write(granted.unmarked(), kLength, next).code == Errc::unknown_region);
    CHECK(pair.reader->counter_value(next) == 0);
    CHECK(granted.untouched(0, kSize));
  }
}

TEST_CASE("a grant does not work with another counter, without one, or beyond its range") {
  for (const auto& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    Granted granted(pair);
    const Imm other = good(pair.reader->allocate_counter(pair.to_writer));
    CHECK(granted.write(granted.unmarked(), kLength, other).code == Errc::unknown_region);
    CHECK(granted.write(granted.unmarked(), kLength, std::nullopt).code == Errc::unknown_region);
    MrDescriptor longer = granted.descriptor;
    longer.length += 1;
    CHECK(granted.write(longer, kLength + 1, granted.imm).code == Errc::out_of_bounds);
    CHECK(pair.reader->counter_value(other) == 0);
    CHECK(pair.reader->counter_value(granted.imm) == 0);
    CHECK(granted.untouched(0, kSize));
    // The connection stays.
    CHECK(granted.write(granted.descriptor, kLength, granted.imm).code == Errc::ok);
  }
}

TEST_CASE("grants end with their region") {
  for (const auto& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    Granted granted(pair);
    CHECK(granted.write(granted.descriptor, kLength, granted.imm).code == Errc::ok);
    good(pair.reader->deregister(granted.destination));
    std::memset(granted.destination->host(), 0, kSize);
    CHECK(granted.write(granted.descriptor, kLength, granted.imm).code != Errc::ok);
    CHECK(granted.untouched(0, kSize));
    const RegionRange range{granted.destination, 0, 1};
    CHECK(pair.reader->grant(granted.imm, {&range, 1}).error().code == Errc::unknown_region);
  }
}

TEST_CASE("releasing counters under way does not affect the connection or other grants") {
  for (const auto& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const auto source = good(pair.writer->allocate(16u << 20));
    const auto destination = good(pair.reader->allocate(16u << 20));
    std::fill_n(source->host(), source->size(), std::byte{0x5a});
    const RegionRange first{destination, 0, 8u << 20};
    const RegionRange second{destination, 8u << 20, 8u << 20};
    for (int round = 0; round < 4; ++round) {
      const Imm revoked = good(pair.reader->allocate_counter(pair.to_writer));
      const Imm kept = good(pair.reader->allocate_counter(pair.to_writer));
      const auto away = good(pair.reader->grant(revoked, {&first, 1})).front();
      const auto stays = good(pair.reader->grant(kept, {&second, 1})).front();
      const auto lost = good(
          pair.writer->write(pair.to_reader, source, away, {.length = 8u << 20}, {.imm = revoked}));
      const auto wanted = good(
          pair.writer->write(pair.to_reader, source, stays, {.length = 8u << 20}, {.imm = kept}));
      while (round % 2 == 1 && pair.reader->counter_value(revoked) == 0) std::this_thread::yield();
      pair.reader->release_counter(revoked);
      std::memset(destination->host(), 0, 8u << 20);
      const auto done = pair.writer.await(Kind::write, wanted.id);
      CHECK_MESSAGE(done.code == Errc::ok, done.text);
      good(pair.reader->expect(kept, wanted.immediates));
      CHECK(pair.reader.await(Kind::counter, kept).code == Errc::ok);
      CHECK(std::memcmp(destination->host() + (8u << 20), source->host(), 8u << 20) == 0);
      (void)pair.writer.await(Kind::write, lost.id);
      CHECK(std::all_of(destination->host(), destination->host() + (8u << 20),
                        [](std::byte byte) { return byte == std::byte{0}; }));
      pair.reader->release_counter(kept);
    }
  }
}

TEST_SUITE_END();

TEST_CASE("a grant names its immediate, and a write without it is not sent") {
  Pair pair("tcp");
  Granted granted(pair);
  CHECK(good(MrDescriptor::decode(granted.descriptor.encode())).imm == granted.imm);
  const std::string takes = "imm=" + std::to_string(granted.imm);
  for (const auto& wrong : {std::optional<Imm>(), std::optional<Imm>(granted.imm + 1)}) {
    const auto refused = pair.writer->write(pair.to_reader, granted.source, granted.descriptor,
                                            {.length = kLength}, {.imm = wrong});
    REQUIRE(!refused);
    CHECK(refused.error().code == Errc::invalid_argument);
    CHECK(refused.error().text.find(takes) != std::string::npos);
  }
  CHECK(pair.reader->stats().writes_refused.total == 0);
}

TEST_CASE("the error names what cannot be granted") {
  Pair pair("tcp");
  const auto region = good(pair.reader->allocate(kSize));
  const Imm anybody = good(pair.reader->allocate_counter());
  const Imm imm = good(pair.reader->allocate_counter(pair.to_writer));
  const auto refused = [&](Imm with, const RegionRange& range) {
    return pair.reader->grant(with, {&range, 1}).error().code;
  };
  CHECK(refused(anybody, {region, 0, kSize}) == Errc::invalid_argument);
  CHECK(refused(imm + 1, {region, 0, kSize}) == Errc::invalid_argument);
  CHECK(refused(imm, {region, 0, 0}) == Errc::out_of_bounds);
  CHECK(refused(imm, {region, 1, kSize}) == Errc::out_of_bounds);
  CHECK(refused(imm, {region, kSize + 1, UINT64_MAX}) == Errc::out_of_bounds);
  CHECK(refused(imm, {good(pair.writer->allocate(kSize)), 0, kSize}) == Errc::unknown_region);
}

// --- NICs with memory windows, on the simulated network ----------------------------------------

namespace {

EngineOptions with_windows(const std::string& name, unsigned nics) {
  static unsigned engines = 0;
  std::vector<std::pair<std::string, std::uint64_t>> named;
  const std::string prefix = "windows" + std::to_string(++engines) + "/";
  for (unsigned n = 0; n < nics; ++n) named.emplace_back(prefix + std::to_string(n), 100);
  EngineOptions options = options_for("tcp", name);
  options.tcp = false;
  options.peer_timeout = std::chrono::seconds(10);
  options.more_nics = simulated_network().nics(std::move(named), {.windows = true});
  return options;
}

struct Windows {
  Windows(unsigned writer_nics, unsigned reader_nics)
      : writer(with_windows("writer", writer_nics)),
        reader(with_windows("reader", reader_nics)),
        to_reader(writer.connect_to(reader)),
        to_writer(reader.await(Kind::peer_up).peer),
        source(good(writer->allocate(8u << 20))),
        destination(good(reader->allocate(8u << 20))) {
    std::fill_n(source->host(), source->size(), std::byte{0x5a});
  }
  MrDescriptor grant(Imm imm) {
    const RegionRange range{destination, kOffset, (8u << 20) - kOffset};
    return good(reader->grant(imm, {&range, 1})).front();
  }
  Submitted submit(const MrDescriptor& to, Imm imm) {
    return good(writer->write(to_reader, source, to, {.length = to.length}, {.imm = imm}));
  }
  void write_all() {
    const Imm imm = good(reader->allocate_counter(to_writer));
    const auto submitted = submit(grant(imm), imm);
    const auto done = writer.await(Kind::write, submitted.id);
    CHECK_MESSAGE(done.code == Errc::ok, done.text);
    good(reader->expect(imm, submitted.immediates));
    CHECK(reader.await(Kind::counter, imm).code == Errc::ok);
    CHECK(std::memcmp(source->host(), destination->host() + kOffset,
                      destination->size() - kOffset) == 0);
    reader->release_counter(imm);
    std::memset(destination->host(), 0, destination->size());
  }

  TestEngine writer;
  TestEngine reader;
  PeerId to_reader;
  PeerId to_writer;
  RegionPtr source;
  RegionPtr destination;
};

}  // namespace

TEST_CASE("windows open on every path of any mix of NICs") {
  for (const auto& [ours, theirs] : {std::pair{1u, 1u}, {1u, 4u}, {4u, 1u}, {2u, 3u}}) {
    CAPTURE(ours);
    CAPTURE(theirs);
    Windows windows(ours, theirs);
    for (int i = 0; i < 3; ++i) windows.write_all();
    for (std::size_t nic = 0; nic < ours; ++nic) {
      CHECK(simulated_network().delivered(windows.writer->nics()[nic].name) > 0);
    }
  }
}

TEST_CASE("a writer that does not stop when it is asked loses its paths, not its connection") {
  Windows windows(2, 2);
  windows.write_all();
  const Imm imm = good(windows.reader->allocate_counter(windows.to_writer));
  const MrDescriptor granted = windows.grant(imm);
  simulated_network().hold(true);
  const auto stuck = windows.submit(granted, imm);
  // The writes are on the wire, so the writer cannot confirm that none will land.
  while (windows.writer->stats().writes_posted < 16) std::this_thread::yield();
  windows.reader->release_counter(imm);
  simulated_network().hold(false);
  CHECK(windows.writer.await(Kind::write, stuck.id).code == Errc::stale_counter);
  CHECK(windows.reader->stats().peers == 1);
  CHECK(std::all_of(windows.destination->host(),
                    windows.destination->host() + windows.destination->size(),
                    [](std::byte byte) { return byte == std::byte{0}; }));
  windows.write_all();
}

TEST_CASE("windows follow their grants to paths that come later") {
  Windows windows(2, 2);
  const Imm imm = good(windows.reader->allocate_counter(windows.to_writer));
  const MrDescriptor granted = windows.grant(imm);
  const std::string nic = windows.writer->nics()[0].name;
  for (int round = 0; round < 3; ++round) {
    const auto submitted = windows.submit(granted, imm);
    simulated_network().set_link(nic, false);
    const auto done = windows.writer.await(Kind::write, submitted.id);
    CHECK_MESSAGE(done.code == Errc::ok, done.text);
    CHECK(std::memcmp(windows.source->host(), windows.destination->host() + kOffset,
                      granted.length) == 0);
    simulated_network().set_link(nic, true);
    // Waits until there is a path again and its window is open.
    const std::uint64_t before = simulated_network().delivered(nic);
    while (simulated_network().delivered(nic) == before) {
      const auto more = windows.submit(granted, imm);
      REQUIRE(windows.writer.await(Kind::write, more.id).code == Errc::ok);
    }
  }
}

TEST_CASE("a path that is lost and not replaced does not delay writes to a grant") {
  Windows windows(2, 1);  // two paths to one NIC
  const Imm imm = good(windows.reader->allocate_counter(windows.to_writer));
  const MrDescriptor granted = windows.grant(imm);
  const auto first = windows.submit(granted, imm);
  CHECK(windows.writer.await(Kind::write, first.id).code == Errc::ok);
  simulated_network().set_link(windows.writer->nics()[0].name, false);
  for (int i = 0; i < 3; ++i) {
    const auto more = windows.submit(granted, imm);
    const auto done = windows.writer.await(Kind::write, more.id);
    CHECK_MESSAGE(done.code == Errc::ok, done.text);
  }
}

TEST_CASE("a counter and a grant can be used only by their writer") {
  for (const std::string fabric : {"tcp", "local", "simulated"}) {
    CAPTURE(fabric);
    TestEngine reader(options_for(fabric, "reader"));
    TestEngine writer(options_for(fabric, "writer"));
    TestEngine other(options_for(fabric, "other"));
    const PeerId writer_to_reader = writer.connect_to(reader);
    const PeerId to_writer = reader.await(Kind::peer_up).peer;
    const PeerId other_to_reader = other.connect_to(reader);
    const auto destination = good(reader->allocate(kSize));
    const auto source = good(other->allocate(kSize));
    std::fill_n(source->host(), kSize, std::byte{0x5a});
    const Imm imm = good(reader->allocate_counter(to_writer));
    const RegionRange range{destination, 0, kSize};
    const auto granted = good(reader->grant(imm, {&range, 1})).front();

    const auto stolen =
        good(other->write(other_to_reader, source, granted, {.length = kSize}, {.imm = imm}));
    CHECK(other.await(Kind::write, stolen.id).code != Errc::ok);
    const auto guessed = good(other->write_imm(other_to_reader, imm));
    (void)other.await(Kind::write, guessed.id);
    CHECK(std::all_of(destination->host(), destination->host() + kSize,
                      [](std::byte byte) { return byte == std::byte{0}; }));
    const auto counted = good(writer->write_imm(writer_to_reader, imm));
    CHECK(writer.await(Kind::write, counted.id).code == Errc::ok);
    good(reader->expect(imm, 1));
    CHECK(reader.await(Kind::counter, imm).code == Errc::ok);
    CHECK(reader->counter_value(imm) == 1);
  }
}
