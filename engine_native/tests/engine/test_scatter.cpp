// One operation to many peers, counters that run freely, and writes that wait for compute.
#include <cstring>
#include <thread>

#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

TEST_SUITE_BEGIN("conformance");

namespace {

constexpr std::size_t kPart = 96u << 10;

struct Star {
  Star(const std::string& fabric, std::size_t peers) : centre(options_for(fabric, "centre")) {
    source = good(centre->allocate(peers * kPart));
    for (std::size_t i = 0; i < peers; ++i) {
      auto& peer = *rim.emplace_back(
          std::make_unique<TestEngine>(options_for(fabric, "rim" + std::to_string(i))));
      ids.push_back(centre.connect_to(peer));
      regions.push_back(good(peer->allocate(kPart)));
      imms.push_back(good(peer->allocate_counter()));
    }
  }
  PeerGroupPtr group() { return good(centre->peer_group(ids)); }
  TestEngine centre;
  RegionPtr source;
  std::vector<std::unique_ptr<TestEngine>> rim;
  std::vector<PeerId> ids;
  std::vector<RegionPtr> regions;
  std::vector<Imm> imms;
};

}  // namespace

TEST_CASE("a scatter gives every peer its part, and a barrier counts at each") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Random random;
    CAPTURE(random.seed);
    Star star(fabric, 5);
    random.fill(star.source->host(), star.source->size());
    // The immediates are equal, as each is its peer's first counter.
    for (const Imm imm : star.imms) REQUIRE(imm == star.imms[0]);
    std::vector<ScatterPart> parts;
    for (std::size_t i = 0; i < star.ids.size(); ++i) {
      const std::uint64_t length = i == 2 ? 0 : kPart - i * 1000;
      parts.push_back({.member = i,
                       .destination = star.regions[i]->descriptor(),
                       .write = {.source_offset = i * kPart, .length = length}});
    }
    const auto submitted = good(star.centre->scatter(star.source, star.group(), parts,
                                                     {.imm = star.imms[0], .timeout = kDeadline}));
    REQUIRE(submitted.immediates.size() == parts.size());
    CHECK(star.centre.await(Kind::write, submitted.id).code == Errc::ok);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      good((*star.rim[i])->expect(star.imms[i], submitted.immediates[i]));
      CHECK(star.rim[i]->await(Kind::counter, star.imms[i]).code == Errc::ok);
      const std::size_t length = parts[i].write.length;
      CHECK(std::memcmp(star.regions[i]->host(), star.source->host() + i * kPart, length) == 0);
      if (length < kPart) CHECK(star.regions[i]->host()[length] == std::byte{0});
    }
    const auto told =
        good(star.centre->barrier(star.group(), star.imms[0], {.timeout = kDeadline}));
    for (std::size_t i = 0; i < star.ids.size(); ++i) {
      CHECK(told.immediates[i] == 1);
      good((*star.rim[i])->expect(star.imms[i], submitted.immediates[i] + 1));
      CHECK(star.rim[i]->await(Kind::counter, star.imms[i]).code == Errc::ok);
    }
  }
}

TEST_CASE("a scatter with one bad part submits none") {
  Star star("tcp", 3);
  std::vector<ScatterPart> parts;
  for (std::size_t i = 0; i < 3; ++i) {
    parts.push_back({.member = i,
                     .destination = star.regions[i]->descriptor(),
                     .write = {.destination_offset = i == 1 ? kPart : 0, .length = 100}});
  }
  const auto refused =
      star.centre->scatter(star.source, star.group(), parts, {.imm = star.imms[0]});
  REQUIRE(!refused);
  CHECK(refused.error().code == Errc::out_of_bounds);
  CHECK(star.centre->stats().writes_posted == 0);
  // Nor do its valid parts count as queued.
  parts[1].write.destination_offset = 0;
  const auto again = good(star.centre->scatter(star.source, star.group(), parts));
  CHECK(star.centre.await(Kind::write, again.id).code == Errc::ok);
}

TEST_CASE("a scatter that fails in parts ends once, with the failure of each peer") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Star star(fabric, 4);
    const auto word = TransferEngine::watch_word();
    const auto none = good(star.centre->barrier(good(star.centre->peer_group({})), 1));
    CHECK(star.centre.await(Kind::write, none.id).code == Errc::ok);
    const auto told = good(star.centre->barrier(star.group(), star.imms[0], {.after = {word, 1}}));
    (*star.rim[1])->close();
    (*star.rim[3])->close();
    for (int lost = 0; lost < 2; ++lost) star.centre.await(Kind::peer_down);
    word->value.store(1);
    star.centre->wake();
    const auto ended = star.centre.await(Kind::write, told.id);
    CHECK(ended.code == Errc::peer_lost);
    CHECK(ended.peer == star.ids[1]);
    REQUIRE(ended.failed.size() == 2);
    CHECK(ended.failed[0].part == 1);
    CHECK(ended.failed[1].part == 3);
    CHECK(ended.failed[1].peer == star.ids[3]);
    CHECK(ended.failed[1].code == Errc::peer_lost);
    for (const std::size_t alive : {0U, 2U}) {
      good((*star.rim[alive])->expect(star.imms[alive], 1));
      CHECK(star.rim[alive]->await(Kind::counter, star.imms[alive]).code == Errc::ok);
    }
  }
}

TEST_CASE("a list of writes between many regions is one operation with one total") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Random random;
    CAPTURE(random.seed);
    Pair pair(fabric);
    constexpr std::size_t kRegions = 3;
    constexpr std::size_t kBytes = 3u << 20;
    std::vector<RegionPtr> from;
    std::vector<RegionPtr> to;
    std::vector<std::vector<std::byte>> expected;
    for (std::size_t i = 0; i < kRegions; ++i) {
      from.push_back(good(pair.writer->allocate(kBytes)));
      to.push_back(good(pair.reader->allocate(kBytes)));
      random.fill(from.back()->host(), kBytes);
      expected.emplace_back(kBytes);
    }
    std::vector<ListedWrite> list;
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < 40; ++i) {
      const std::size_t source = random.below(kRegions);
      const std::size_t destination = i % kRegions;
      // One is longer than a write on the wire; none overlap.
      const std::uint64_t length = i == 0 ? (2u << 20) + 5 : 1 + random.below(16 << 10);
      const std::uint64_t place = i == 0 ? 0 : (i / kRegions + 130) * (16 << 10);
      const std::uint64_t offset = random.below(kBytes - length);
      list.push_back({.source = from[source],
                      .destination = to[destination]->descriptor(),
                      .write = {offset, place, length}});
      std::memcpy(expected[destination].data() + place, from[source]->host() + offset, length);
      bytes += length;
    }
    const Imm imm = good(pair.reader->allocate_counter());
    const auto submitted =
        good(pair.writer->write_list(pair.to_reader, list, {.imm = imm, .timeout = kDeadline}));
    CHECK(submitted.bytes == bytes);
    CHECK(submitted.writes >= list.size() + 2);
    good(pair.reader->expect(imm, submitted.immediates));
    CHECK(pair.reader.await(Kind::counter, imm).code == Errc::ok);
    const auto ended = pair.writer.await(Kind::write, submitted.id);
    CHECK_MESSAGE(ended.code == Errc::ok, ended.text);
    for (std::size_t i = 0; i < kRegions; ++i) {
      CHECK(std::memcmp(to[i]->host(), expected[i].data(), kBytes) == 0);
    }
  }
}

TEST_CASE("a list of writes with a bad one submits none, and the error says which it is") {
  Pair pair("tcp");
  const auto source = good(pair.writer->allocate(kPart));
  const auto destination = good(pair.reader->allocate(kPart))->descriptor();
  const std::vector<ListedWrite> list{{source, destination, {.length = 100}},
                                      {source, destination, {.source_offset = kPart, .length = 1}}};
  const auto refused = pair.writer->write_list(pair.to_reader, list);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == Errc::out_of_bounds);
  CHECK(refused.error().text.starts_with("write 1 of the list: source range"));
  CHECK(pair.writer->write_list(pair.to_reader, {}).error().code == Errc::invalid_argument);
  CHECK(pair.writer->stats().writes_posted == 0);
}

TEST_CASE("a counter that runs freely may be waited for again and again") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const Imm imm = good(pair.reader->allocate_counter());
    good(pair.reader->subscribe(imm));
    std::uint64_t told = 0;
    for (std::uint64_t round = 1; round <= 20; ++round) {
      for (int i = 0; i < 3; ++i) good(pair.writer->write_imm(pair.to_reader, imm));
      good(pair.reader->expect(imm, round * 3 - 1, Expect::at_least));
      CHECK(pair.reader.await(Kind::counter, imm).code == Errc::ok);
      while (told < round * 3) {
        pair.reader.await(Kind::arrival, imm);
        const std::uint64_t now = pair.reader->take_arrivals(imm);
        CHECK(now > told);
        told = now;
      }
    }
    CHECK(told == 60);
  }
}

TEST_CASE("a release that has to ask its peers reports when it is done") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const Imm untouched = good(pair.reader->allocate_counter(pair.to_writer));
    const bool done = pair.reader->begin_release_counter(untouched);
    CHECK(done == !places_by_nic(fabric));
    if (!done) pair.reader.await(Kind::released, untouched);
    // No write of a counter can be under way once its total has arrived.
    const Imm complete = good(pair.reader->allocate_counter(pair.to_writer));
    good(pair.writer->write_imm(pair.to_reader, complete));
    good(pair.reader->expect(complete, 1));
    CHECK(pair.reader.await(Kind::counter, complete).code == Errc::ok);
    CHECK(pair.reader->begin_release_counter(complete));
  }
}

TEST_CASE("a write waits for its watched word") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const auto source = good(pair.writer->allocate(kPart));
    const auto destination = good(pair.reader->allocate(kPart));
    const auto word = TransferEngine::watch_word();
    constexpr std::size_t kSteps = 8;
    const Imm imm = good(pair.reader->allocate_counter());
    std::vector<OperationId> operations;
    for (std::size_t step = 0; step < kSteps; ++step) {
      operations.push_back(
          good(
              pair.writer->write(
                  pair.to_reader, source, destination->descriptor(),
                  {.source_offset = step * 1000, .destination_offset = step * 1000, .length = 1000},
                  {.imm = imm, .timeout = kDeadline, .after = {word, step + 1}}))
              .id);
    }
    CHECK(pair.writer->stats().writes_posted == 0);
    for (std::size_t step = 0; step < kSteps; ++step) {
      std::memset(source->host() + step * 1000, static_cast<int>(step + 1), 1000);
      word->value.fetch_add(1, std::memory_order_release);  // as compute does, without a call
      if (step % 2 == 0) pair.writer->wake();
      CHECK(pair.writer.await(Kind::write, operations[step]).code == Errc::ok);
      CHECK(pair.writer->stats().writes_posted == step + 1);
    }
    good(pair.reader->expect(imm, kSteps));
    CHECK(pair.reader.await(Kind::counter, imm).code == Errc::ok);
    CHECK(std::memcmp(source->host(), destination->host(), kSteps * 1000) == 0);
  }
}

TEST_CASE("a write that waits for a word can be cancelled, and has a deadline") {
  Pair pair("tcp");
  const auto word = TransferEngine::watch_word();
  const auto cancelled = good(pair.writer->write_imm(pair.to_reader, 1, {.after = {word, 1}}));
  pair.writer->cancel(cancelled.id);
  CHECK(pair.writer.await(Kind::write, cancelled.id).code == Errc::cancelled);
  const auto late = good(pair.writer->write_imm(
      pair.to_reader, 1, {.timeout = std::chrono::milliseconds(50), .after = {word, 1}}));
  CHECK(pair.writer.await(Kind::write, late.id).code == Errc::deadline_exceeded);
  word->value.store(1);
  pair.writer->wake();
  CHECK(pair.writer->stats().writes_posted == 0);
  CHECK(pair.writer->stats().peers == 1);
}

TEST_SUITE_END();
