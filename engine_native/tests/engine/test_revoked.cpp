// Counters that are released, or never counted, while their writes are under way: no trace of them
// loses the peer later. Over doubles of NICs, which hold writes back.
#include <algorithm>
#include <thread>

#include "conformance.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

class Transfers {
 public:
  explicit Transfers(const std::string& fabric)
      : pair(fabric),
        source(good(pair.writer->allocate(kSize))),
        destination(good(pair.reader->allocate(kSize))),
        fabric_(fabric) {
    // The writes that open a path have arrived before it is held.
    for (std::uint32_t nic = 0; nic < pair.writer->nics().size(); ++nic) {
      const auto first =
          good(pair.writer->write(pair.to_reader, source, destination->descriptor(), {.length = 1},
                                  {.timeout = kDeadline, .nic = nic}));
      REQUIRE(pair.writer.await(Kind::write, first.id).code == Errc::ok);
    }
  }

  void hold(bool held) { hold_nics(fabric_, pair.writer->nics(), held); }
  Submitted submit(Imm imm) {
    return good(pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                   {.length = kSize}, {.imm = imm, .timeout = kDeadline}));
  }
  // Posts a write on paths, which hold it.
  OperationId post(Imm imm) {
    const std::uint64_t before = pair.writer->stats().writes_posted;
    const Submitted submitted = submit(imm);
    while (pair.writer->stats().writes_posted < before + submitted.writes) {
      std::this_thread::yield();
    }
    return submitted.id;
  }
  // Returns once the writer has seen all earlier messages of the reader.
  void meet() {
    good(pair.reader->send(pair.to_writer, "met"));
    pair.writer.await(Kind::message);
  }
  // Resets the paths, as happens if a writer does not stop in time.
  void reset_paths() {
    const Imm imm = good(pair.reader->allocate_counter(pair.to_writer));
    hold(true);
    const OperationId late = post(imm);
    pair.reader->release_counter(imm);
    hold(false);
    CHECK(pair.writer.await(Kind::write, late).code == Errc::stale_counter);
  }
  void check_that_they_go_on() {
    write_and_count(pair.writer, pair.to_reader, pair.reader, source, destination,
                    {.length = kSize});
    CHECK(pair.writer->stats().peers == 1);
  }

  Pair pair;
  RegionPtr source;
  RegionPtr destination;

 private:
  static constexpr std::size_t kSize = std::size_t{1} << 20;
  std::string fabric_;
};

}  // namespace

TEST_CASE(
    "a write that was cancelled and then revoked is forgotten: a path lost later costs no peer") {
  for (const std::string& fabric : held_fabrics()) {
    CAPTURE(fabric);
    Transfers transfers(fabric);
    auto& [writer, reader, to_reader, to_writer] = transfers.pair;
    const Imm imm = good(reader->allocate_counter(to_writer));
    transfers.hold(true);
    const OperationId cancelled = transfers.post(imm);
    writer->cancel(cancelled);
    (void)writer->stats();  // handled after the cancel
    REQUIRE(!reader->begin_release_counter(imm));
    transfers.meet();
    transfers.hold(false);
    CHECK(writer.await(Kind::write, cancelled).code == Errc::cancelled);
    reader.await(Kind::released, imm);
    transfers.reset_paths();
    transfers.check_that_they_go_on();
  }
}

TEST_CASE("immediates that their receiver does not count cost no peer, and later writes fail") {
  for (const std::string& fabric : held_fabrics()) {
    CAPTURE(fabric);
    Transfers transfers(fabric);
    auto& [writer, reader, to_reader, to_writer] = transfers.pair;
    TestEngine other(options_for(fabric, "other"));
    (void)other.connect_to(reader);
    const PeerId to_other =
        reader.await([&](const Completion& c) { return c.kind == Kind::peer_up; }).peer;
    const Imm others = good(reader->allocate_counter(to_other));
    const Submitted stray = transfers.submit(others);
    (void)writer.await(Kind::write, stray.id);
    while (reader->stats().writes_refused.total < stray.immediates) std::this_thread::yield();
    transfers.reset_paths();
    transfers.check_that_they_go_on();
    const Submitted again = transfers.submit(others);
    CHECK(writer.await(Kind::write, again.id).code == Errc::stale_counter);
    CHECK(reader->counter_value(others) == 0);
  }
}
