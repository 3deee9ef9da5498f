// Writes between two engines, with the same promises on every fabric.
#include <cstring>
#include <thread>

#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

TEST_SUITE_BEGIN("conformance");

namespace {

constexpr std::size_t kPool = 4u << 20;

// The origin of the source memory, which decides its path on the local fabric.
enum class Source { allocated, registered, part_of_shared };

struct SourcePool {
  SourcePool(TestEngine& engine, Source kind, std::size_t bytes) : owned(0) {
    if (kind == Source::allocated) {
      region = good(engine->allocate(bytes));
    } else if (kind == Source::part_of_shared) {
      // Between bytes of other users; the region keeps the memory alive.
      const auto shared = good(allocate_shared(bytes + kPool));
      region = good(engine->register_memory(bytes_of(shared).data() + kPool / 2 + 3, bytes));
    } else {
      owned.resize(bytes);
      region = good(engine->register_memory(owned.data(), bytes));
    }
  }
  std::vector<std::byte> owned;
  RegionPtr region;
};

void check_pages(Pair& pair, Source kind, std::size_t page, std::size_t count, std::size_t stride,
                 Random& random) {
  SourcePool source(pair.writer, kind, kPool);
  const auto destination = good(pair.reader->allocate(kPool));
  random.fill(source.region->host(), kPool);
  std::vector<std::byte> expected(kPool);
  const std::size_t pool_pages = (kPool - page) / stride;
  const auto from = random.distinct_pages(count, pool_pages);
  const auto to = random.distinct_pages(count, pool_pages);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(expected.data() + static_cast<std::size_t>(to[i]) * stride,
                source.region->host() + static_cast<std::size_t>(from[i]) * stride, page);
  }
  const Imm imm = good(pair.reader->allocate_counter());
  const auto submitted =
      good(pair.writer->write_pages(pair.to_reader, source.region, destination->descriptor(),
                                    {.page_length = page,
                                     .source_pages = from,
                                     .destination_pages = to,
                                     .source_stride = stride,
                                     .destination_stride = stride},
                                    {.imm = imm, .timeout = kDeadline}));
  CHECK(submitted.bytes == page * count);
  good(pair.reader->expect(imm, submitted.immediates));
  CHECK(pair.reader.await(Kind::counter, imm).code == Errc::ok);
  const auto done = pair.writer.await(Kind::write, submitted.id);
  CHECK_MESSAGE(done.code == Errc::ok, done.text);
  CHECK(pair.reader->counter_value(imm) == submitted.immediates);
  CHECK(std::memcmp(destination->host(), expected.data(), kPool) == 0);
  good(pair.writer->deregister(source.region));
  good(pair.reader->deregister(destination));
  pair.reader->release_counter(imm);
}

}  // namespace

TEST_CASE("scattered pages arrive byte for byte and the counter shows the announced total") {
  Random random;
  CAPTURE(random.seed);
  for (const std::string& fabric : EachFabric()) {
    for (const Source kind : {Source::allocated, Source::registered, Source::part_of_shared}) {
      CAPTURE(fabric);
      Pair pair(fabric, kind == Source::registered ? 3 : 1);
      check_pages(pair, kind, 64, 2000, 128, random);
      check_pages(pair, kind, 1024, 1500, 1024, random);
      check_pages(pair, kind, 4096, 700, 4096, random);
      check_pages(pair, kind, 5000, 300, 5003, random);
      check_pages(pair, kind, 65536, 30, 65536, random);
    }
  }
}

TEST_CASE("one large write is split and arrives whole") {
  Random random;
  CAPTURE(random.seed);
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric, 3);
    SourcePool source(pair.writer, Source::registered, 9u << 20);
    const auto destination = good(pair.reader->allocate(9u << 20));
    random.fill(source.region->host(), source.region->size());
    const Imm imm = good(pair.reader->allocate_counter());
    const auto submitted = good(
        pair.writer->write(pair.to_reader, source.region, destination->descriptor(),
                           {.source_offset = 3, .destination_offset = 1, .length = (8u << 20) + 77},
                           {.imm = imm, .timeout = kDeadline}));
    CHECK(submitted.writes == 9);
    good(pair.reader->expect(imm, submitted.immediates));
    pair.reader.await(Kind::counter, imm);
    CHECK(pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
    CHECK(std::memcmp(destination->host() + 1, source.region->host() + 3, (8u << 20) + 77) == 0);
    CHECK(destination->host()[0] == std::byte{0});
    CHECK(destination->host()[(8u << 20) + 78] == std::byte{0});
  }
}

TEST_CASE("both directions at once, many operations, none lost") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const auto a = good(pair.writer->allocate(kPool));
    const auto b = good(pair.reader->allocate(kPool));
    const Imm at_reader = good(pair.reader->allocate_counter());
    const Imm at_writer = good(pair.writer->allocate_counter());
    constexpr int kOperations = 300;
    std::uint64_t to_reader = 0;
    std::uint64_t to_writer = 0;
    std::thread other([&] {
      for (int i = 0; i < kOperations; ++i) {
        to_writer += good(pair.reader->write(pair.to_writer, b, a->descriptor(),
                                             {.destination_offset = kPool / 2, .length = 70000},
                                             {.imm = at_writer, .timeout = kDeadline}))
                         .immediates;
      }
    });
    for (int i = 0; i < kOperations; ++i) {
      to_reader += good(pair.writer->write(pair.to_reader, a, b->descriptor(),
                                           {.destination_offset = kPool / 2, .length = 70000},
                                           {.imm = at_reader, .timeout = kDeadline}))
                       .immediates;
    }
    other.join();
    good(pair.reader->expect(at_reader, to_reader));
    good(pair.writer->expect(at_writer, to_writer));
    CHECK(pair.reader.await(Kind::counter, at_reader).code == Errc::ok);
    CHECK(pair.writer.await(Kind::counter, at_writer).code == Errc::ok);
    for (int i = 0; i < kOperations; ++i) {
      const auto sent = pair.writer.await(Kind::write);
      CHECK_MESSAGE(sent.code == Errc::ok, sent.text);
      const auto answered = pair.reader.await(Kind::write);
      CHECK_MESSAGE(answered.code == Errc::ok, answered.text);
    }
  }
}

TEST_CASE("an immediate without bytes counts, even before a wait") {
  for (const std::string& fabric : EachFabric()) {
    Pair pair(fabric);
    const Imm imm = good(pair.reader->allocate_counter());
    const auto submitted =
        good(pair.writer->write_imm(pair.to_reader, imm, {.timeout = kDeadline}));
    CHECK(pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
    while (pair.reader->counter_value(imm) == 0) std::this_thread::yield();
    good(pair.reader->expect(imm, 1));
    CHECK(pair.reader.await(Kind::counter, imm).code == Errc::ok);
    CHECK(pair.reader->counter_value(imm) == 1);
  }
}

TEST_CASE("a refused write changes no byte, counts nothing and names the cause") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const auto source = good(pair.writer->allocate(kPool));
    const auto destination = good(pair.reader->allocate(kPool));
    std::memset(source->host(), 0x5a, kPool);
    const Imm imm = good(pair.reader->allocate_counter());
    const auto attempt = [&](MrDescriptor descriptor, std::uint64_t offset, Imm with) {
      const auto submitted = good(pair.writer->write(
          pair.to_reader, source, descriptor, {.destination_offset = offset, .length = 300000},
          {.imm = with, .timeout = kDeadline}));
      return pair.writer.await(Kind::write, submitted.id);
    };

    MrDescriptor foreign = destination->descriptor();
    foreign.key ^= 1;
    CHECK(attempt(foreign, 0, imm).code == Errc::unknown_region);

    MrDescriptor stretched = destination->descriptor();
    stretched.length *= 2;  // passes the sender's check, but not the receiver's
    CHECK(attempt(stretched, kPool - 1000, imm).code == Errc::out_of_bounds);
    CHECK(attempt(stretched, kPool + 1000, imm).code == Errc::out_of_bounds);

    const Imm released = good(pair.reader->allocate_counter());
    pair.reader->release_counter(released);
    const auto stale = attempt(destination->descriptor(), 0, released);
    CHECK(stale.code == Errc::stale_counter);
    CHECK(stale.text.find("'reader'") != std::string::npos);

    const auto gone = good(pair.reader->allocate(kPool));
    good(pair.reader->deregister(gone));
    CHECK(attempt(gone->descriptor(), 0, imm).code == Errc::unknown_region);

    MrDescriptor elsewhere = destination->descriptor();
    elsewhere.engine.bytes[0] ^= 1;
    const auto refused = pair.writer->write(pair.to_reader, source, elsewhere, {.length = 8},
                                            {.imm = imm, .timeout = kDeadline});
    REQUIRE(!refused);
    CHECK(refused.error().code == Errc::unknown_region);

    CHECK(pair.reader->counter_value(imm) == 0);
    for (std::size_t i = 0; i < kPool; ++i) REQUIRE(destination->host()[i] == std::byte{0});
    CHECK(pair.reader->stats().writes_refused.total > 0);

    // The connection has survived.
    const auto valid =
        good(pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                {.length = 300000}, {.imm = imm, .timeout = kDeadline}));
    CHECK(pair.writer.await(Kind::write, valid.id).code == Errc::ok);
    good(pair.reader->expect(imm, valid.immediates));
    CHECK(pair.reader.await(Kind::counter, imm).code == Errc::ok);
  }
}

TEST_CASE("a cancelled operation ends and posts nothing more") {
  for (const std::string& fabric : EachFabric()) {
    Pair pair(fabric);
    const auto source = good(pair.writer->allocate(64u << 20));
    const auto destination = good(pair.reader->allocate(64u << 20));
    const auto submitted =
        good(pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                {.length = 64u << 20}, {.timeout = kDeadline}));
    pair.writer->cancel(submitted.id);
    const auto done = pair.writer.await(Kind::write, submitted.id);
    CHECK((done.code == Errc::cancelled || done.code == Errc::ok));
    pair.writer->cancel(submitted.id);  // a second cancel has no effect
    const auto again = good(pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                               {.length = 100}, {.timeout = kDeadline}));
    CHECK(pair.writer.await(Kind::write, again.id).code == Errc::ok);
  }
}

TEST_CASE("deregistering a source ends the operations that read it") {
  for (const std::string& fabric : EachFabric()) {
    Pair pair(fabric);
    const auto source = good(pair.writer->allocate(64u << 20));
    const auto destination = good(pair.reader->allocate(64u << 20));
    const auto submitted =
        good(pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                {.length = 64u << 20}, {.timeout = kDeadline}));
    good(pair.writer->deregister(source));
    const auto done = pair.writer.await(Kind::write, submitted.id);
    CHECK((done.code == Errc::cancelled || done.code == Errc::ok));
  }
}

TEST_CASE("after release_counter returned, no write with that immediate lands") {
  Random random;
  CAPTURE(random.seed);
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const auto source = good(pair.writer->allocate(kPool));
    const auto destination = good(pair.reader->allocate(kPool));
    std::memset(source->host(), 0x77, kPool);
    const auto pages = random.distinct_pages(4096, 4096);
    for (int round = 0; round < 30; ++round) {
      const Imm imm = good(pair.reader->allocate_counter());
      const auto submitted = good(
          pair.writer->write_pages(pair.to_reader, source, destination->descriptor(),
                                   same_pages(1024, pages), {.imm = imm, .timeout = kDeadline}));
      while (pair.reader->counter_value(imm) == 0 && random.below(4) != 0) {
      }
      pair.reader->release_counter(imm);
      std::memset(destination->host(), 0x11, kPool);  // the pages have another owner now
      const auto done = pair.writer.await(Kind::write, submitted.id);
      CHECK((done.code == Errc::ok || done.code == Errc::stale_counter));
      std::size_t changed = 0;
      for (std::size_t i = 0; i < kPool; ++i) changed += destination->host()[i] != std::byte{0x11};
      REQUIRE(changed == 0);
    }
  }
}

TEST_CASE("memory cannot be a source once it is deregistered") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const auto source = good(pair.writer->allocate(4096));
    const auto destination = good(pair.reader->allocate(4096));
    good(pair.writer->deregister(source));
    const auto submitted =
        good(pair.writer->write(pair.to_reader, source, destination->descriptor(), {.length = 4096},
                                {.timeout = kDeadline}));
    CHECK(pair.writer.await(Kind::write, submitted.id).code == Errc::unknown_region);
    CHECK(pair.writer->stats().peers == 1);
  }
}

TEST_SUITE_END();
