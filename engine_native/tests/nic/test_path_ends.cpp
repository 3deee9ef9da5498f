// Paths that end while the writer has completions of writes that the reader's host has not seen:
// such writes are counted, and the peers stay. Over doubles whose NICs drop unread completions at a
// close.
#include <thread>

#ifdef KVXFER_HAVE_OFI
#include "doubles/simulated_efa.hpp"
#endif
#include "doubles/simulated_nic.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

// The controls of the double of a fabric's NICs.
struct Double {
  std::function<void(bool)> hold;
  std::function<void(const std::string&, bool)> withhold_arrivals;
  std::function<std::size_t()> ends_closed;
};

Double double_of(const std::string& fabric) {
#ifdef KVXFER_HAVE_OFI
  if (fabric == "efa") {
    return {.hold = [](bool held) { simulated_efa().hold(held); },
            .withhold_arrivals = [](const std::string&,
                                    bool withheld) { simulated_efa().withhold_arrivals(withheld); },
            .ends_closed = [] { return simulated_efa().ends_closed(); }};
  }
#endif
  auto& network = simulated_network();
  REQUIRE(fabric == "simulated");
  return {.hold = [&](bool held) { network.hold(held); },
          .withhold_arrivals = [&](const std::string& nic,
                                   bool withheld) { network.withhold_arrivals(nic, withheld); },
          .ends_closed = [&] { return network.ends_closed(); }};
}

std::vector<std::string> doubled_fabrics() {
#ifdef KVXFER_HAVE_OFI
  return {"simulated", "efa"};
#else
  return {"simulated"};
#endif
}

struct Ending {
  explicit Ending(const std::string& fabric)
      : nics(double_of(fabric)),
        pair(fabric),
        source(good(pair.writer->allocate(kPage * kPages))),
        destination(good(pair.reader->allocate(kPage * kPages))) {
    // A write over each NIC; the greeting of its path arrives, too.
    for (std::uint32_t nic = 0; nic < pair.writer->nics().size(); ++nic) {
      REQUIRE(pair.writer.await(Kind::write, submit(counter(), nic)).code == Errc::ok);
    }
  }

  Imm counter() { return good(pair.reader->allocate_counter(pair.to_writer)); }
  OperationId submit(Imm imm, std::optional<std::uint32_t> nic = {}) {
    const auto submitted =
        good(pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                {.length = kPage}, {.imm = imm, .timeout = kDeadline, .nic = nic}));
    REQUIRE(submitted.immediates == 1);
    return submitted.id;
  }
  // Delivers a write over NIC 0; its writer knows of the arrival, but its reader does not.
  void deliver_unseen(Imm imm) {
    nics.withhold_arrivals(pair.reader->nics()[0].name, true);
    REQUIRE(pair.writer.await(Kind::write, submit(imm, 0)).code == Errc::ok);
    CHECK(pair.reader->counter_value(imm) == 0);
  }
  void post_held(Imm imm) {
    nics.hold(true);
    const std::uint64_t before = pair.writer->stats().writes_posted;
    held = submit(imm);
    while (pair.writer->stats().writes_posted == before) std::this_thread::yield();
    closed = nics.ends_closed();
  }
  // Releases arrivals once `count` more ends were closed.
  void release_after(std::size_t count) {
    while (nics.ends_closed() < closed + count) std::this_thread::yield();
    nics.withhold_arrivals(pair.reader->nics()[0].name, false);
    nics.hold(false);
  }
  void check_count(Imm imm) {
    good(pair.reader->expect(imm, 1));
    const auto ended = pair.reader.await([&](const Completion& completion) {
      return completion.kind == Kind::peer_down ||
             (completion.kind == Kind::counter && completion.id == imm);
    });
    REQUIRE_MESSAGE(ended.kind == Kind::counter, ended.text);
    CHECK(ended.code == Errc::ok);
  }
  void check_that_they_go_on() {
    write_and_count(pair.writer, pair.to_reader, pair.reader, source, destination,
                    {.length = kPage * kPages});
    CHECK(pair.writer->stats().peers == 1);
    CHECK(pair.reader->stats().peers == 1);
  }

  Double nics;
  Pair pair;
  RegionPtr source;
  RegionPtr destination;
  OperationId held = 0;
  std::size_t closed = 0;
};

}  // namespace

TEST_CASE(
    "paths are reset for a late writer: writes that the reader has not seen yet are counted") {
  for (const std::string& fabric : doubled_fabrics()) {
    CAPTURE(fabric);
    Ending ending(fabric);
    auto& [writer, reader, to_reader, to_writer] = ending.pair;
    const Imm unseen = ending.counter();
    const Imm late = ending.counter();
    ending.deliver_unseen(unseen);
    ending.post_held(late);
    REQUIRE(!reader->begin_release_counter(late));
    ending.release_after(reader->nics().size());
    ending.check_count(unseen);
    CHECK(writer.await(Kind::write, ending.held).code == Errc::stale_counter);
    reader.await(Kind::released, late);
    ending.check_that_they_go_on();
  }
}

TEST_CASE(
    "a link goes down: writes that the reader has not seen yet are counted, others continue") {
  Ending ending("simulated");
  auto& [writer, reader, to_reader, to_writer] = ending.pair;
  const Imm unseen = ending.counter();
  const Imm other = ending.counter();
  ending.deliver_unseen(unseen);
  ending.post_held(other);
  simulated_network().set_link(reader->nics()[0].name, false);
  ending.release_after(1);
  ending.check_count(unseen);
  ending.check_count(other);
  CHECK(writer.await(Kind::write, ending.held).code == Errc::ok);
  ending.check_that_they_go_on();
}
