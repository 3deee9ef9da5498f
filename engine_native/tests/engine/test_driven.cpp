// Engines without a thread, which work while their caller polls.
#include <poll.h>

#include <cstring>
#include <future>
#include <thread>

#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

struct Driven {
  bool writer;
  bool reader;
};

// Two engines that one thread uses; some have no thread.
struct DrivenPair {
  DrivenPair(const std::string& fabric, Driven driven)
      : writer(options(fabric, "writer", !driven.writer)),
        reader(options(fabric, "reader", !driven.reader)) {
    writer.meanwhile = reader.meanwhile = [this] {
      const bool moved = writer->poll();
      if (!reader->poll() && !moved) std::this_thread::yield();
    };
    to_reader = writer.connect_to(reader);
    to_writer = reader.await(Kind::peer_up).peer;
  }

  static EngineOptions options(const std::string& fabric, const std::string& name, bool thread) {
    EngineOptions options = options_for(fabric, name);
    options.thread = thread;
    return options;
  }

  TestEngine writer;
  TestEngine reader;
  PeerId to_reader = 0;
  PeerId to_writer = 0;
};

bool readable(const TestEngine& engine) {
  pollfd event{.fd = const_cast<TestEngine&>(engine)->event_fd(), .events = POLLIN, .revents = 0};
  return ::poll(&event, 1, 0) > 0;
}

void write_and_end(const std::string& fabric, Driven driven, Random& random) {
  CAPTURE(random.seed);
  CAPTURE(fabric);
  CAPTURE(driven.writer);
  CAPTURE(driven.reader);
  DrivenPair pair(fabric, driven);
  const auto source = good(pair.writer->allocate(kPages * kPage));
  const auto destination = good(pair.reader->allocate(kPages * kPage));
  random.fill(source->host(), kPages * kPage);
  const auto pages = random.distinct_pages(kPages, kPages);
  const Imm imm = good(pair.reader->allocate_counter());
  const auto submitted =
      good(pair.writer->write_pages(pair.to_reader, source, destination->descriptor(),
                                    same_pages(kPage, pages), {.imm = imm, .timeout = kDeadline}));
  good(pair.reader->expect(imm, submitted.immediates));
  CHECK(pair.reader.await(Kind::counter, imm).code == Errc::ok);
  CHECK(pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
  CHECK(std::memcmp(source->host(), destination->host(), kPages * kPage) == 0);

  good(pair.reader->send(pair.to_writer, "done"));
  CHECK(pair.writer.await(Kind::message).data == "done");
  if (!places_by_nic(fabric)) CHECK(pair.reader->stats().bytes_received == kPages * kPage);

  pair.reader->release_counter(imm);
  const auto late = good(pair.writer->write_imm(pair.to_reader, imm, {.timeout = kDeadline}));
  pair.writer.await(Kind::write, late.id);
  CHECK(pair.reader->counter_value(imm) == 0);
  good(pair.writer->deregister(source));
  good(pair.reader->fence(pair.to_writer));
  CHECK(pair.writer.await(Kind::peer_down).peer == pair.to_reader);
}

void count_and_close(const std::string& fabric, int before) {
  CAPTURE(fabric);
  CAPTURE(before);
  DrivenPair pair(fabric, {true, true});
  const auto source = good(pair.writer->allocate(kPage));
  const auto destination = good(pair.reader->allocate(kPage));
  const Imm imm = good(pair.reader->allocate_counter());
  for (int i = 0; i < before; ++i) pair.writer->poll();
  const auto submitted =
      good(pair.writer->write(pair.to_reader, source, destination->descriptor(), {.length = kPage},
                              {.imm = imm, .timeout = kDeadline}));
  while (pair.reader->counter_value(imm) == 0) {
    pair.writer->poll();
    pair.reader->poll();  // last, so the writer has not seen that its write was counted
  }
  pair.reader->close();
  CHECK(pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
  CHECK(pair.writer.await(Kind::peer_down).code == Errc::peer_lost);
}

}  // namespace

TEST_SUITE_BEGIN("conformance");

TEST_CASE("an engine without a thread keeps its promises while its caller polls") {
  Random random;
  for (const std::string& fabric : EachFabric()) {
    for (const Driven driven : {Driven{true, false}, Driven{false, true}, Driven{true, true}}) {
      // On a separate thread, as other cases count the commands of threads that poll NICs.
      std::async(std::launch::async, [&] { write_and_end(fabric, driven, random); }).get();
    }
  }
}

// `before` is the number of polls of the writer before, which decides when it reads its sockets.
TEST_CASE("a write that was counted is delivered, even if the receiver then closes") {
  for (const std::string& fabric : EachFabric()) {
    for (int before = 0; before < 8; ++before) {
      // On a separate thread, as above.
      std::async(std::launch::async, [&] { count_and_close(fabric, before); }).get();
    }
  }
}

TEST_SUITE_END();

TEST_CASE("an engine without a thread does nothing between two polls, and signals nothing") {
  DrivenPair pair("tcp", {false, true});
  const Imm imm = good(pair.reader->allocate_counter());
  const auto submitted = good(pair.writer->write_imm(pair.to_reader, imm, {.timeout = kDeadline}));
  // It has left the writer, so the bytes are in the peer's socket.
  while (pair.writer->stats().writes_posted == 0) std::this_thread::yield();
  CHECK(pair.reader->counter_value(imm) == 0);
  good(pair.reader->expect(imm, submitted.immediates));
  while (pair.reader->counter_value(imm) == 0) pair.reader->poll();
  CHECK_FALSE(readable(pair.reader));
  CHECK(pair.reader.await(Kind::counter, imm).code == Errc::ok);
}

TEST_CASE("an engine without a thread that is closed polls nothing, and ends what was under way") {
  DrivenPair pair("tcp", {true, false});
  const Imm imm = good(pair.reader->allocate_counter());
  const auto submitted = good(pair.writer->write_imm(pair.to_reader, imm, {.timeout = kDeadline}));
  pair.writer->close();
  pair.writer->close();
  CHECK_FALSE(pair.writer->poll());
  CHECK(pair.writer.await(Kind::write, submitted.id).code == Errc::engine_closed);
  CHECK_FALSE(pair.writer->fence(pair.to_reader));
}

TEST_CASE("an engine without a thread has none to pin") {
  EngineOptions options = options_for("tcp", "driven");
  options.thread = false;
  options.cpus = {0};
  const auto engine = TransferEngine::create(std::move(options));
  REQUIRE_FALSE(engine);
  CHECK(engine.error().code == Errc::invalid_argument);
  CHECK(engine.error().text.find("leave cpus out") != std::string::npos);
}
