// The first path between two engines is not joined at once, as a hardware address is not known yet
// or a link comes up late. On the simulated network, with NICs only.
#include "clock.hpp"
#include "doubles/simulated_nic.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

// More attempts than are made before any deadline here.
constexpr unsigned kAlways = 1'000'000;

EngineOptions with_one_nic(const std::string& name) {
  static unsigned engines = 0;
  EngineOptions options = options_for("tcp", name);
  options.tcp = false;
  options.more_nics =
      simulated_network().nics({{"first contact/" + std::to_string(++engines), 100}});
  return options;
}

std::string nic_of(TestEngine& engine) { return engine->nics()[0].name; }

struct Strangers {
  TestEngine initiator{with_one_nic("initiator")};
  TestEngine acceptor{with_one_nic("acceptor")};
};

}  // namespace

TEST_CASE("a path that cannot be joined at first is tried again on either side") {
  for (const bool at_initiator : {true, false}) {
    CAPTURE(at_initiator);
    Strangers pair;
    const std::string nic = nic_of(at_initiator ? pair.initiator : pair.acceptor);
    simulated_network().refuse_joins(nic, 3);
    const PeerId peer = pair.initiator.connect_to(pair.acceptor);
    CHECK(simulated_network().refusals_left(nic) == 0);
    const auto source = good(pair.initiator->allocate(4096));
    const auto destination = good(pair.acceptor->allocate(4096));
    write_and_count(pair.initiator, peer, pair.acceptor, source, destination, {.length = 4096});
  }
}

TEST_CASE("the acceptor waits for as long as the initiator's connect allows") {
  Strangers pair;
  simulated_network().refuse_joins(nic_of(pair.acceptor), 10);  // 2.5 s and more
  pair.initiator.connect_to(pair.acceptor);
  CHECK(simulated_network().refusals_left(nic_of(pair.acceptor)) == 0);
}

TEST_CASE("a path that cannot be joined fails the connect at its deadline, with the cause") {
  constexpr auto kTimeout = std::chrono::seconds(3);
  for (const bool at_initiator : {true, false}) {
    CAPTURE(at_initiator);
    Strangers pair;
    const std::string nic = nic_of(at_initiator ? pair.initiator : pair.acceptor);
    simulated_network().refuse_joins(nic, kAlways);
    const std::uint64_t begun = now_ns();
    const auto id = pair.initiator->connect(pair.acceptor->address(), kTimeout);
    const auto done = pair.initiator.await(Kind::connect, id);
    CHECK(now_ns() - begun >= static_cast<std::uint64_t>(Duration(kTimeout).count()));
    CHECK(simulated_network().refusals_left(nic) < kAlways - 1);
    CHECK(done.code == Errc::connect_failed);
    for (const char* part : {"acceptor", "no NIC has a path to it", nic.c_str()}) {
      CHECK_MESSAGE(done.text.find(part) != std::string::npos, done.text);
    }
    // The attempt leaves nothing behind on either side, so the next one succeeds.
    simulated_network().refuse_joins(nic, 0);
    pair.initiator.connect_to(pair.acceptor);
    CHECK(pair.acceptor->stats().peers == 1);
  }
}

TEST_CASE("a link that comes up before the deadline is used") {
  Strangers pair;
  simulated_network().set_link(nic_of(pair.initiator), false);
  pair.initiator.await(Kind::notice);
  const auto patient = pair.initiator->connect(pair.acceptor->address(), kDeadline);
  const auto hasty = pair.initiator->connect(pair.acceptor->address(), std::chrono::seconds(3));
  const auto late = pair.initiator.await(Kind::connect, hasty);
  CHECK(late.code == Errc::connect_failed);
  CHECK_MESSAGE(late.text.find("their links are down") != std::string::npos, late.text);
  simulated_network().set_link(nic_of(pair.initiator), true);
  CHECK(pair.initiator.await(Kind::connect, patient).code == Errc::ok);
}
