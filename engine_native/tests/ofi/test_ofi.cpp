// Engines over libfabric, as far as it differs from other fabrics; the suite "conformance" has the
// common cases. test_ofi_paths.cpp tests their NICs alone.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>

#include "fabric/ofi/disorder.hpp"
#include "ofi/ofi_bench.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

TEST_SUITE_BEGIN("ofi");

namespace {

struct Engines {
  Engines(EngineOptions a, EngineOptions b)
      : writer(std::move(a)),
        reader(std::move(b)),
        to_reader(writer.connect_to(reader)),
        to_writer(reader.await(Kind::peer_up).peer),
        source(good(writer->allocate(kPage * kPages))),
        destination(good(reader->allocate(kPage * kPages))) {}

  // Writes scattered pages; checks every byte and the count.
  void write(Random& random) {
    random.fill(source->host(), source->size());
    std::fill_n(destination->host(), destination->size(), std::byte{0});
    const auto from = random.distinct_pages(kPages / 2, kPages);
    const auto to = random.distinct_pages(kPages / 2, kPages);
    const Imm imm = good(reader->allocate_counter());
    const auto submitted = good(writer->write_pages(to_reader, source, destination->descriptor(),
                                                    {.page_length = kPage,
                                                     .source_pages = from,
                                                     .destination_pages = to,
                                                     .source_stride = kPage,
                                                     .destination_stride = kPage},
                                                    {.imm = imm, .timeout = kDeadline}));
    const auto done = writer.await(Kind::write, submitted.id);
    CHECK_MESSAGE(done.code == Errc::ok, done.text);
    good(reader->expect(imm, submitted.immediates));
    CHECK(reader.await(Kind::counter, imm).code == Errc::ok);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < to.size(); ++i) {
      wrong +=
          std::memcmp(source->host() + static_cast<std::size_t>(from[i]) * kPage,
                      destination->host() + static_cast<std::size_t>(to[i]) * kPage, kPage) != 0;
    }
    CHECK(wrong == 0);
    reader->release_counter(imm);
  }

  TestEngine writer;
  TestEngine reader;
  PeerId to_reader;
  PeerId to_writer;
  RegionPtr source;
  RegionPtr destination;
};

}  // namespace

TEST_CASE("ofi: pages arrive over 1 and 3 endpoints, in EFA's disorder or not") {
  if (ofi_skipped()) return;
  Random random;
  CAPTURE(random.seed);
  for (const unsigned endpoints : {1u, 3u}) {
    for (const bool strict : {false, true}) {
      CAPTURE(endpoints);
      CAPTURE(strict);
      const auto options = strict ? strict_ofi_options : ofi_options;
      Engines engines(options("writer", endpoints), options("reader", endpoints));
      CHECK(engines.writer.await(Kind::peer_up).fabric == "ofi");
      REQUIRE(engines.writer->nics().size() == endpoints);
      CHECK(engines.writer->nics().back().name == "lo/" + std::to_string(endpoints - 1));
      CHECK(engines.writer->nics().back().network == "ofi-tcp");
      for (int i = 0; i < 3; ++i) engines.write(random);
    }
  }
}

TEST_CASE("ofi: NICs without wake-ups move everything") {
  if (ofi_skipped()) return;
  Random random;
  CAPTURE(random.seed);
  const auto blind = [](const std::string& name) {
    EngineOptions options = strict_ofi_options(name);
    options.ofi = FabricUse::never;
    options.more_nics = std::make_shared<ofi::OfiFactory>(
        ofi::OfiFactory::Overrides{.wait_object = false, .use = FabricUse::required});
    return options;
  };
  Engines napping(blind("writer"), blind("reader"));
  for (int i = 0; i < 3; ++i) napping.write(random);
}

TEST_CASE("ofi: exactly 200,000 immediates are counted") {
  if (ofi_skipped()) return;
  Engines engines(strict_ofi_options("writer", 2), strict_ofi_options("reader", 2));
  constexpr std::uint64_t kTotal = 200'000;
  const Imm imm = good(engines.reader->allocate_counter());
  good(engines.reader->expect(imm, kTotal));
  for (std::uint64_t i = 0; i < kTotal; ++i) {
    const auto submitted =
        engines.writer->write_imm(engines.to_reader, imm, {.timeout = kDeadline});
    REQUIRE_MESSAGE(submitted, submitted.error().text);
  }
  CHECK(engines.reader.await(Kind::counter, imm, kDeadline).code == Errc::ok);
  for (std::uint64_t done = 0; done < kTotal;) {
    for (const Completion& completion : engines.writer->drain()) {
      REQUIRE_MESSAGE(completion.code == Errc::ok, completion.text);
      done += completion.kind == Kind::write;
    }
    std::this_thread::yield();
  }
  CHECK(engines.reader->counter_value(imm) == kTotal);
}

TEST_CASE("ofi: a region is written under each of its registrations") {
  if (ofi_skipped()) return;
  Engines engines(strict_ofi_options("writer"), strict_ofi_options("reader"));
  alignas(4096) static std::array<std::byte, 1u << 20> memory;
  MrDescriptor old{};
  for (int round = 1; round <= 3; ++round) {
    const auto region = good(engines.reader->register_memory(memory.data(), memory.size()));
    CHECK(region->descriptor().key != old.key);
    std::fill_n(engines.source->host(), memory.size(), static_cast<std::byte>(round));
    const auto submitted =
        good(engines.writer->write(engines.to_reader, engines.source, region->descriptor(),
                                   {.length = memory.size()}, {.timeout = kDeadline}));
    const auto done = engines.writer.await(Kind::write, submitted.id);
    CHECK_MESSAGE(done.code == Errc::ok, done.text);
    CHECK(std::all_of(memory.begin(), memory.end(),
                      [&](std::byte b) { return b == static_cast<std::byte>(round); }));
    if (round > 1) {
      const auto late = good(engines.writer->write(engines.to_reader, engines.source, old,
                                                   {.length = 1}, {.timeout = kDeadline}));
      CHECK(engines.writer.await(Kind::write, late.id).code == Errc::unknown_region);
    }
    old = region->descriptor();
    good(engines.reader->deregister(region));
  }
}

TEST_CASE("ofi: fencing one writer does not affect the transfer of another") {
  if (ofi_skipped()) return;
  TestEngine reader(strict_ofi_options("reader"));
  TestEngine fenced(strict_ofi_options("fenced"));
  TestEngine other(strict_ofi_options("other"));
  const auto from_fenced = fenced.connect_to(reader);
  const auto to_fenced = reader.await(Kind::peer_up).peer;
  const auto from_other = other.connect_to(reader);
  const auto bad = good(reader->allocate(16u << 20));
  const auto fine = good(reader->allocate(16u << 20));
  const auto source = good(fenced->allocate(16u << 20));
  const auto source_too = good(other->allocate(16u << 20));
  std::fill_n(source_too->host(), source_too->size(), std::byte{0x22});
  const auto mine = good(fenced->write(from_fenced, source, bad->descriptor(),
                                       {.length = 16u << 20}, {.timeout = kDeadline}));
  const auto theirs = good(other->write(from_other, source_too, fine->descriptor(),
                                        {.length = 16u << 20}, {.timeout = kDeadline}));
  good(reader->fence(to_fenced));
  const auto ended = fenced.await(Kind::write, mine.id);
  CHECK((ended.code == Errc::peer_lost || ended.code == Errc::ok));
  const auto done = other.await(Kind::write, theirs.id);
  CHECK_MESSAGE(done.code == Errc::ok, done.text);
  CHECK(count_other_than(fine, std::byte{0x22}) == 0);
}

TEST_CASE("ofi: a reader that closes in mid-transfer does not affect that of another") {
  if (ofi_skipped()) return;
  constexpr std::size_t kBytes = 64u << 20;
  TestEngine writer(strict_ofi_options("writer"));
  TestEngine reader(strict_ofi_options("reader"));
  const auto source = good(writer->allocate(kBytes));
  std::fill_n(source->host(), kBytes, std::byte{0x22});
  const auto write = [&](PeerId peer, const RegionPtr& destination, Imm imm) {
    return good(writer->write(peer, source, destination->descriptor(), {.length = kBytes},
                              {.imm = imm, .timeout = kDeadline}));
  };
  const auto destination = good(reader->allocate(kBytes));
  const auto to_reader = writer.connect_to(reader);
  for (int round = 0; round < 3; ++round) {
    CAPTURE(round);
    const Imm imm = good(reader->allocate_counter());
    std::fill_n(destination->host(), kBytes, std::byte{0});
    const auto kept = write(to_reader, destination, imm);
    OperationId cut = 0;
    {
      TestEngine leaver(strict_ofi_options("leaver"));
      const Imm begun = good(leaver->allocate_counter());
      cut = write(writer.connect_to(leaver), good(leaver->allocate(kBytes)), begun).id;
      while (leaver->counter_value(begun) == 0) std::this_thread::yield();
    }
    const auto lost = writer.await(Kind::write, cut);
    CHECK((lost.code == Errc::peer_lost || lost.code == Errc::ok));
    const auto done = writer.await(Kind::write, kept.id);
    CHECK_MESSAGE(done.code == Errc::ok, done.text);
    good(reader->expect(imm, kept.immediates));
    CHECK(reader.await(Kind::counter, imm).code == Errc::ok);
    CHECK(reader->counter_value(imm) == kept.immediates);
    CHECK(count_other_than(destination, std::byte{0x22}) == 0);
    reader->release_counter(imm);
  }
}

TEST_CASE("ofi: a transfer survives paths that are lost with another region, and is counted once") {
  if (ofi_skipped()) return;
  constexpr std::size_t kBytes = 64u << 20;
  TestEngine writer(strict_ofi_options("writer", 3));
  TestEngine reader(strict_ofi_options("reader", 1));
  const auto to_reader = writer.connect_to(reader);
  const auto source = good(writer->allocate(kBytes));
  const auto kept = good(reader->allocate(kBytes));
  const auto write = [&](const RegionPtr& destination, Imm imm, std::optional<unsigned> nic) {
    return good(writer->write(to_reader, source, destination->descriptor(), {.length = kBytes},
                              {.imm = imm, .timeout = kDeadline, .nic = nic}));
  };
  for (int round = 1; round <= 4; ++round) {
    CAPTURE(round);
    std::fill_n(source->host(), kBytes, static_cast<std::byte>(round));
    const auto gone = good(reader->allocate(kBytes));
    const Imm begun = good(reader->allocate_counter());
    const auto late = write(gone, begun, 0);
    const Imm imm = good(reader->allocate_counter());
    const auto submitted = write(kept, imm, std::nullopt);
    while (reader->counter_value(begun) == 0) std::this_thread::yield();
    good(reader->deregister(gone));
    const auto done = writer.await(Kind::write, submitted.id);
    CHECK_MESSAGE(done.code == Errc::ok, done.text);
    good(reader->expect(imm, submitted.immediates));
    CHECK(reader.await(Kind::counter, imm).code == Errc::ok);
    CHECK(count_other_than(kept, static_cast<std::byte>(round)) == 0);
    const auto code = writer.await(Kind::write, late.id).code;
    CHECK((code == Errc::ok || code == Errc::unknown_region));
    reader->release_counter(begun);
    reader->release_counter(imm);
  }
}

TEST_CASE("ofi: idle engines use next to no processor time") {
  if (ofi_skipped()) return;
  Random random;
  Engines engines(ofi_options("writer", 2), ofi_options("reader", 2));
  engines.write(random);
  CHECK(comes_to_rest());  // an engine that spins would use a whole core
  engines.write(random);
}

// --- processes that die ----------------------------------------------------------------------

// The case below runs this in a separate process.
TEST_CASE("ofi helper: a reader that waits to be killed" * doctest::skip()) {
  const char* const out = std::getenv("KVXFER_TEST_PIPE");
  REQUIRE(out);
  TestEngine reader(ofi_options("victim"));
  const auto memory = good(reader->allocate(64u << 20));
  const std::string text = reader->address().text() + "\n";
  const std::string descriptor = memory->descriptor().encode();
  const int fd = std::atoi(out);
  REQUIRE(::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  REQUIRE(::write(fd, descriptor.data(), descriptor.size()) ==
          static_cast<ssize_t>(descriptor.size()));
  while (true) ::pause();
}

namespace {

struct Victim {
  Victim() {
    std::array<int, 2> ends{};
    REQUIRE(::pipe(ends.data()) == 0);
    ::setenv("KVXFER_TEST_PIPE", std::to_string(ends[1]).c_str(), 1);
    pid = start_case("ofi helper*");
    ::close(ends[1]);
    std::string text;
    for (char c = 0; ::read(ends[0], &c, 1) == 1 && c != '\n';) text += c;
    address = good(EngineAddress::parse(text));
    std::string bytes(MrDescriptor::kBytes, '\0');
    for (std::size_t got = 0; got < bytes.size();) {
      const ssize_t more = ::read(ends[0], bytes.data() + got, bytes.size() - got);
      REQUIRE(more > 0);
      got += static_cast<std::size_t>(more);
    }
    descriptor = good(MrDescriptor::decode(bytes));
    ::close(ends[0]);
  }
  ~Victim() { kill(); }
  void kill() {
    if (pid == 0) return;
    ::kill(pid, SIGKILL);
    ::waitpid(std::exchange(pid, 0), nullptr, 0);
  }
  pid_t pid = 0;
  EngineAddress address;
  MrDescriptor descriptor;
};

}  // namespace

TEST_CASE(
    "ofi: a reader that is killed in mid-transfer is lost, and the next one gets its writes") {
  if (ofi_skipped()) return;
  TestEngine writer(ofi_options("writer"));
  const auto source = good(writer->allocate(64u << 20));
  for (int round = 0; round < 2; ++round) {
    Victim victim;
    const auto connect = writer->connect(victim.address, kDeadline);
    const auto connected = writer.await(Kind::connect, connect);
    REQUIRE_MESSAGE(connected.code == Errc::ok, connected.text);
    std::set<OperationId> operations;
    const auto submit = [&](const WatchFor& after) {
      operations.insert(
          good(writer->write(connected.peer, source, victim.descriptor, {.length = 64u << 20},
                             {.timeout = kDeadline, .after = after}))
              .id);
    };
    for (int i = 0; i < 8; ++i) submit({});
    submit({TransferEngine::watch_word(), 1});  // is under way, however fast the others are
    const auto first = writer.await(Kind::write, *operations.begin());
    CHECK_MESSAGE(first.code == Errc::ok, first.text);
    operations.erase(operations.begin());
    victim.kill();
    bool lost = false;
    for (const OperationId id : operations) {
      const auto done = writer.await(Kind::write, id);
      CHECK((done.code == Errc::ok || done.code == Errc::peer_lost || done.code == Errc::nic_lost));
      lost = lost || done.code != Errc::ok;
    }
    CHECK(lost);
    const auto down = writer.await(Kind::peer_down);
    CHECK(down.peer == connected.peer);
    CHECK(down.text.find("'victim'") != std::string::npos);
  }
}

// --- options ---------------------------------------------------------------------------------

TEST_CASE(
    "ofi: the error names what is missing if ofi is required; otherwise engines do without it") {
  const auto refused = [](EngineOptions options) {
    const auto engine = TransferEngine::create(std::move(options));
    REQUIRE(!engine);
    CHECK(engine.error().code == Errc::fabric_unavailable);
    return engine.error().text;
  };
  EngineOptions efa = options_for("tcp", "efa");
  efa.ofi = FabricUse::if_available;
  if (!ofi::efa_device_present()) {
    CHECK(good(TransferEngine::create(efa))->nics().empty());
    efa.ofi = FabricUse::required;
    CHECK(refused(efa).find("this host has no EFA") != std::string::npos);
  }
  if (ofi_skipped()) return;
  EngineOptions options = ofi_options("nobody");
  options.nics = {"mlx5_0"};
  CHECK(refused(options).find("it has ") != std::string::npos);
  options.nics = {"lo", "lo/1", "mlx5_0"};
  CHECK(refused(options).find("nics names lo/1, mlx5_0, which") != std::string::npos);
  options.ofi_provider = "no-such-provider";
  CHECK(refused(options).find("'no-such-provider'") != std::string::npos);
  options = ofi_options("second", 3);
  options.nics = {"lo/1"};
  const auto engine = good(TransferEngine::create(options));
  REQUIRE(engine->nics().size() == 1);
  CHECK(engine->nics().front().name == "lo/1");

  const std::string library = std::getenv("KVXFER_LIBFABRIC");
  ::setenv("KVXFER_LIBFABRIC", "/nowhere/libfabric.so.1", 1);
  CHECK(refused(options).find("/nowhere/libfabric.so.1") != std::string::npos);
  options.ofi = FabricUse::if_available;
  options.tcp = true;
  CHECK(good(TransferEngine::create(options))->nics().empty());
  ::setenv("KVXFER_LIBFABRIC", library.c_str(), 1);
}

TEST_CASE("ofi: disorder loses no completion, repeats none, and keeps no order") {
  Random random;
  CAPTURE(random.seed);
  ofi::Disorder disorder(random.engine());
  std::vector<std::uint64_t> out;
  constexpr std::uint64_t kCount = 10'000;
  const auto take = [&](const std::vector<ofi::Completion>& released) {
    for (const auto& completion : released) out.push_back(completion.sequence);
  };
  for (std::uint64_t i = 0; i < kCount; ++i) {
    disorder.hold({.sequence = i});
    if (i % 16 == 0) take(disorder.release());
  }
  while (!disorder.empty()) take(disorder.release());
  CHECK(!std::is_sorted(out.begin(), out.end()));
  std::sort(out.begin(), out.end());
  REQUIRE(out.size() == kCount);
  for (std::uint64_t i = 0; i < kCount; ++i) REQUIRE(out[i] == i);
}

TEST_SUITE_END();
