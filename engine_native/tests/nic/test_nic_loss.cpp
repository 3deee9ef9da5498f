// NICs that fail under load: nothing is lost, and nothing is counted twice. On the simulated
// network; test_verbs.cpp tests it with real links.
#include <cstring>
#include <thread>

#include "doubles/simulated_nic.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

constexpr std::size_t kSmallPage = 1024;
constexpr std::size_t kManyPages = 4096;

struct Load {
  Load(Random& random, const std::string& fabric) : pair(fabric), random_(random) {
    source = good(pair.writer->allocate(kSmallPage * kManyPages));
    destination = good(pair.reader->allocate(kSmallPage * kManyPages));
  }

  // Writes pages in random order and calls `disturb` meanwhile; then checks every byte and the
  // count.
  void run(const std::function<void()>& disturb) {
    random_.fill(source->host(), source->size());
    const auto pages = random_.distinct_pages(3000, kManyPages);
    const Imm imm = good(pair.reader->allocate_counter(pair.to_writer));
    const auto submitted = good(pair.writer->write_pages(
        pair.to_reader, source, destination->descriptor(), same_pages(kSmallPage, pages),
        {.imm = imm, .timeout = kDeadline}));
    const std::uint64_t begin = 1 + random_.below(submitted.immediates / 2);
    while (pair.reader->counter_value(imm) < begin) std::this_thread::yield();
    disturb();
    const auto done = pair.writer.await(Kind::write, submitted.id);
    CHECK_MESSAGE(done.code == Errc::ok, done.text);
    good(pair.reader->expect(imm, submitted.immediates));
    CHECK(pair.reader.await(Kind::counter, imm).code == Errc::ok);
    CHECK(pair.reader->counter_value(imm) == submitted.immediates);
    for (const auto page : pages) {
      const auto at = static_cast<std::size_t>(page) * kSmallPage;
      REQUIRE(std::memcmp(source->host() + at, destination->host() + at, kSmallPage) == 0);
    }
    pair.reader->release_counter(imm);
  }
  static void set_link(TestEngine& engine, std::size_t nic, bool up) {
    simulated_network().set_link(engine->nics()[nic].name, up);
  }
  // Waits until the engine uses the NIC again.
  void await_use(std::size_t nic) {
    const std::string name = pair.writer->nics()[nic].name;
    const std::uint64_t before = simulated_network().delivered(name);
    while (simulated_network().delivered(name) == before) run([] {});
  }

  Pair pair;
  RegionPtr source;
  RegionPtr destination;

 private:
  Random& random_;
};

}  // namespace

TEST_CASE("the other NICs take the writes of one that fails, and it comes back") {
  Random random;
  CAPTURE(random.seed);
  for (const std::string fabric : {"simulated", "ordered"}) {
    CAPTURE(fabric);
    Load load(random, fabric);
    for (int round = 0; round < 6; ++round) {
      TestEngine& whose = round % 2 == 0 ? load.pair.writer : load.pair.reader;
      const std::size_t nic = random.below(2);
      load.run([&] { Load::set_link(whose, nic, false); });
      load.run([] {});
      Load::set_link(whose, nic, true);
      load.await_use(&whose == &load.pair.writer ? nic : 0);
    }
  }
}

TEST_CASE("writes that arrived, without a completion at their sender, are counted once") {
  Random random;
  CAPTURE(random.seed);
  for (const std::string fabric : {"simulated", "ordered"}) {
    CAPTURE(fabric);
    Load load(random, fabric);
    const std::string nic = load.pair.writer->nics()[0].name;
    for (int round = 0; round < 10; ++round) {
      load.run([&] {
        simulated_network().lose_completions(nic, true);
        const std::uint64_t before = simulated_network().delivered(nic);
        while (simulated_network().delivered(nic) < before + random.below(30)) {
          std::this_thread::yield();
        }
        Load::set_link(load.pair.writer, 0, false);
        simulated_network().lose_completions(nic, false);
      });
      Load::set_link(load.pair.writer, 0, true);
      load.await_use(0);
    }
  }
}

TEST_CASE("a count is never complete without the bytes of a write that was given up") {
  auto& network = simulated_network();
  Pair pair("simulated");
  const RegionPtr source = good(pair.writer->allocate(4096));
  const RegionPtr destination = good(pair.reader->allocate(4096));
  const Imm imm = good(pair.reader->allocate_counter(pair.to_writer));
  const std::string nic = pair.writer->nics()[0].name;
  const auto lose_paths = [&] {
    for (const bool up : {false, true}) {
      network.set_link(nic, up);
      pair.writer.await(Kind::notice);
    }
  };
  const auto submit = [&](std::uint64_t at) {
    return good(pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                   {.source_offset = at, .destination_offset = at, .length = 1024},
                                   {.imm = imm, .timeout = kDeadline, .nic = 0}))
        .id;
  };
  network.lose_completions(nic, true);
  network.hold(true);
  const OperationId first = submit(0);
  const OperationId second = submit(1024);
  network.await_posted(2);
  network.deliver_newest();  // the second arrives, without a completion at its sender
  lose_paths();
  // The first has not arrived, so it is posted again without its immediate, and is given up there.
  network.await_posted(1);
  pair.writer->cancel(first);
  lose_paths();
  CHECK(pair.writer.await(Kind::write, first).code == Errc::cancelled);
  network.lose_completions(nic, false);
  network.hold(false);
  // The write ends before its deadline, as nothing can complete the count.
  const auto done = pair.writer.await(Kind::write, second);
  CHECK(done.code == Errc::nic_lost);
  CHECK_MESSAGE(done.text.find("cannot be completed") != std::string::npos, done.text);
  CHECK(pair.reader->counter_value(imm) == 1);
}

TEST_CASE("after the loss of a path that kept order, only missing groups are posted again") {
  auto& network = simulated_network();
  Pair pair("ordered");
  const RegionPtr source = good(pair.writer->allocate(kSmallPage * 128));
  const RegionPtr destination = good(pair.reader->allocate(kSmallPage * 128));
  std::memset(source->host(), 7, source->size());
  std::vector<std::int64_t> pages;
  for (std::int64_t page = 0; page < 128; page += 2) pages.push_back(page);
  const Imm imm = good(pair.reader->allocate_counter(pair.to_writer));
  const std::string nic = pair.writer->nics()[0].name;
  network.hold(true);
  network.lose_completions(nic, true);
  const auto submitted = good(pair.writer->write_pages(
      pair.to_reader, source, destination->descriptor(), same_pages(kSmallPage, pages),
      {.imm = imm, .timeout = kDeadline, .nic = 0}));
  CHECK(submitted.immediates == 2);
  network.await_posted(64);
  for (int i = 0; i < 40; ++i) network.deliver_newest();  // in order, on this path
  for (const bool up : {false, true}) {
    network.set_link(nic, up);
    pair.writer.await(Kind::notice);
  }
  network.await_posted(32);
  network.lose_completions(nic, false);
  network.hold(false);
  CHECK(pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
  CHECK(pair.writer->stats().writes_posted == 64 + 32);
  good(pair.reader->expect(imm, submitted.immediates));
  CHECK(pair.reader.await(Kind::counter, imm).code == Errc::ok);
  for (const auto page : pages) {
    CHECK(destination->host()[static_cast<std::size_t>(page) * kSmallPage] == std::byte{7});
  }
}

TEST_CASE("a path that was opened for waiting writes gets time to deliver them") {
  auto& network = simulated_network();
  Pair pair("simulated");
  const RegionPtr source = good(pair.writer->allocate(4096));
  const RegionPtr destination = good(pair.reader->allocate(4096));
  const Imm imm = good(pair.reader->allocate_counter(pair.to_writer));
  const auto set_link = [&](std::size_t nic, bool up) {
    network.set_link(pair.writer->nics()[nic].name, up);
    pair.writer.await(Kind::notice);
  };
  const auto submit = [&](std::uint32_t nic, Duration timeout) {
    return good(pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                   {.length = 1024}, {.imm = imm, .timeout = timeout, .nic = nic}))
        .id;
  };
  set_link(1, false);
  network.hold(true);
  const OperationId waiting = submit(0, kDeadline);
  network.await_posted(1);
  set_link(0, false);
  set_link(0, true);
  network.await_posted(1);
  const std::uint64_t posted = pair.writer->stats().writes_posted;
  CHECK(posted == 2);
  // While the test waits for the NIC that is down, nothing is delivered.
  const OperationId unposted = submit(1, std::chrono::seconds(1));
  CHECK(pair.writer.await(Kind::write, unposted).code == Errc::deadline_exceeded);
  CHECK(pair.writer->stats().writes_posted == posted);
  network.hold(false);
  CHECK(pair.writer.await(Kind::write, waiting).code == Errc::ok);
  set_link(1, true);
}

TEST_CASE("an operation that makes progress between losses survives any number of them") {
  auto& network = simulated_network();
  Pair pair("simulated");
  const RegionPtr source = good(pair.writer->allocate(kSmallPage * 16));
  const RegionPtr destination = good(pair.reader->allocate(kSmallPage * 16));
  std::vector<std::int64_t> pages(16);
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<std::int64_t>(16 - 1 - i);
  const std::string nic = pair.writer->nics()[0].name;
  network.hold(true);
  const auto submitted = good(
      pair.writer->write_pages(pair.to_reader, source, destination->descriptor(),
                               same_pages(kSmallPage, pages), {.timeout = kDeadline, .nic = 0}));
  REQUIRE(submitted.writes == pages.size());
  for (std::size_t loss = 1; loss <= 7; ++loss) {
    // Losses within a quarter of a second count once.
    std::this_thread::sleep_for(std::chrono::milliseconds(260));
    network.await_posted(submitted.writes - (loss - 1));
    network.deliver_newest();
    while (pair.writer->stats().writes_sent < loss) std::this_thread::yield();
    network.set_link(nic, false);
    pair.writer.await(Kind::notice);
    network.set_link(nic, true);
    pair.writer.await(Kind::notice);
  }
  network.hold(false);
  const auto ended = pair.writer.await(Kind::write, submitted.id);
  CHECK_MESSAGE(ended.code == Errc::ok, ended.text);
}

TEST_CASE("after a NIC fails on each side, the pair that works is used") {
  Random random;
  CAPTURE(random.seed);
  for (const std::string fabric : {"simulated", "ordered"}) {
    CAPTURE(fabric);
    Load load(random, fabric);
    load.run([&] {
      Load::set_link(load.pair.writer, 0, false);
      Load::set_link(load.pair.reader, 1, false);
    });
    load.run([] {});
  }
}

TEST_CASE("the error names a peer that no NIC reaches any more") {
  auto options = options_for("simulated", "writer");
  options.peer_timeout = std::chrono::seconds(3);
  TestEngine writer(options);
  TestEngine reader(options_for("simulated", "reader"));
  writer.connect_to(reader);
  Load::set_link(writer, 0, false);
  Load::set_link(writer, 1, false);
  const auto down = writer.await(Kind::peer_down);
  CHECK(down.code == Errc::nic_lost);
  CHECK(down.text.find("'reader'") != std::string::npos);
  CHECK(down.text.find("link") != std::string::npos);
}

TEST_CASE("tcp takes over if the NICs are down") {
  auto a = options_for("simulated", "a");
  auto b = options_for("simulated", "b");
  a.tcp = b.tcp = true;
  TestEngine writer(a);
  TestEngine reader(b);
  const PeerId peer = writer.connect_to(reader);
  CHECK(writer.await(Kind::peer_up).fabric == "simulated");
  const auto source = good(writer->allocate(1u << 20));
  const auto destination = good(reader->allocate(1u << 20));
  const auto write = [&] {
    const auto submitted = good(writer->write(peer, source, destination->descriptor(),
                                              {.length = 1u << 20}, {.timeout = kDeadline}));
    return writer.await(Kind::write, submitted.id).code;
  };
  CHECK(write() == Errc::ok);
  Load::set_link(writer, 0, false);
  Load::set_link(writer, 1, false);
  for (int i = 0; i < 20; ++i) CHECK(write() == Errc::ok);
}

TEST_CASE("tcp delivers again, and uncounted, what NICs had delivered to a grant") {
  auto& network = simulated_network();
  auto a = options_for("simulated", "a");
  auto b = options_for("simulated", "b");
  a.tcp = b.tcp = true;
  TestEngine writer(a);
  TestEngine reader(b);
  const PeerId to_reader = writer.connect_to(reader);
  const PeerId to_writer = reader.await(Kind::peer_up).peer;
  constexpr std::size_t kSize = 16 * kSmallPage;
  const auto source = good(writer->allocate(kSize));
  const auto destination = good(reader->allocate(kSize));
  Random random;
  CAPTURE(random.seed);
  random.fill(source->host(), kSize);
  std::memset(destination->host(), 0, kSize);
  const Imm imm = good(reader->allocate_counter(to_writer));
  const RegionRange range{destination, 0, kSize};
  const auto granted = good(reader->grant(imm, {&range, 1})).front();
  network.hold(true);
  for (std::size_t nic = 0; nic < writer->nics().size(); ++nic) {
    network.lose_completions(writer->nics()[nic].name, true);
  }
  // Neighbours would become one write.
  std::vector<std::int64_t> pages{0, 2, 4, 6, 8, 10, 12, 14};
  const auto submitted = good(
      writer->write_pages(to_reader, source, granted, same_pages(kSmallPage, pages), {.imm = imm}));
  REQUIRE(submitted.immediates == 8);
  network.await_posted(8);
  for (int i = 0; i < 3; ++i) network.deliver_newest();
  for (std::size_t nic = 0; nic < writer->nics().size(); ++nic) {
    Load::set_link(writer, nic, false);
  }
  const auto done = writer.await(Kind::write, submitted.id);
  CHECK_MESSAGE(done.code == Errc::ok, done.text);
  good(reader->expect(imm, submitted.immediates));
  CHECK(reader.await(Kind::counter, imm).code == Errc::ok);
  CHECK(reader->counter_value(imm) == submitted.immediates);
  CHECK(reader->stats().writes_refused.total == 0);
  for (const std::int64_t page : pages) {
    const auto at = static_cast<std::size_t>(page) * kSmallPage;
    CHECK(std::memcmp(source->host() + at, destination->host() + at, kSmallPage) == 0);
  }
  for (std::size_t nic = 0; nic < writer->nics().size(); ++nic) {
    network.lose_completions(writer->nics()[nic].name, false);
    Load::set_link(writer, nic, true);
  }
  network.hold(false);
}

TEST_CASE("a count that cannot be completed loses the peer, and the error says why") {
  auto theirs = options_for("simulated", "reader");
  theirs.tuning.path_timeout = std::chrono::milliseconds(300);  // the wait for the arrival
  TestEngine writer(options_for("simulated", "writer"));
  TestEngine reader(theirs);
  const PeerId to_reader = writer.connect_to(reader);
  const std::string there = reader->nics()[0].name;
  const auto source = good(writer->allocate(kPage));
  const auto destination = good(reader->allocate(kPage));
  const Imm imm = good(reader->allocate_counter(reader.await(Kind::peer_up).peer));
  simulated_network().lose_arrivals(there, true);
  const auto submitted =
      good(writer->write(to_reader, source, destination->descriptor(), {.length = kPage},
                         {.imm = imm, .timeout = kDeadline, .nic = 0}));
  CHECK(writer.await(Kind::write, submitted.id).code == Errc::ok);
  simulated_network().set_link(there, false);
  const auto down = writer.await(Kind::peer_down);
  simulated_network().lose_arrivals(there, false);
  CHECK(down.code == Errc::nic_lost);
  CHECK_MESSAGE(down.text.find("cannot be completed") != std::string::npos, down.text);
}
