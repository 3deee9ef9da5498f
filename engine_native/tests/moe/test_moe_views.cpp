// Changes of view: steps that are left out, ranks that are lost or come back, and relays within a
// host.
#include <poll.h>

#include <atomic>
#include <thread>

#include "moe/moe_group.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using kvxfer::moe::Order;
using kvxfer::moe::Waited;

TEST_SUITE_BEGIN("moe");

// --- refused steps ---------------------------------------------------------------------------

namespace {

Given with_a_bad_choice(const moe::Shape& shape, Random& random) {
  Given given = random_given(shape, 1, random);
  given.ids.back() = shape.experts;
  return given;
}

}  // namespace

TEST_CASE("a step that is left out frees its slot, and concurrent steps are run in the next view") {
  for (const Reach& way : all_ways()) {
    CAPTURE(way.fabric);
    CAPTURE(name(way.pairs));
    Random random;
    CAPTURE(random.seed);
    const moe::Shape& shape = kThreeRanks;
    Group group(way.fabric, way.pairs, shape);
    const std::vector<bool> everyone(shape.ranks, true);
    const Tables first(shape, everyone, random);
    const Tables second(shape, everyone, random);
    const auto refused = random_all(shape, random);
    const Given bad = with_a_bad_choice(shape, random);
    const auto beside = random_all(shape, random);
    const auto later = random_all(shape, random);
    const std::vector<bool> none(shape.ranks);
    group.each(group.all(), [&](Member& member) {
      const std::uint32_t rank = member.shape.rank;
      moe::Exchange& exchange = *member.exchange;
      good(exchange.set_view(first.view(1, rank), 0));
      CHECK(good(exchange.dispatch_send(0, beside[rank].tokens())) == 0);
      // Rank 2 cannot begin step 1, which rank 0 has begun and rank 1 has not.
      if (rank == 0) CHECK(good(exchange.dispatch_send(1, refused[rank].tokens())) == 1);
      good(exchange.leave_out(1));
      good(exchange.set_view(second.view(2, rank), 0));
      const StepOf step{shape, beside, second.of};
      member.await_dispatch(0);
      good(exchange.combine_send(0, place_and_compute(step, member, 0, Order::by_expert).data()));
      if (rank == 1) {
        CHECK(exchange.dispatch_send(1, bad.tokens()).error().code == Errc::invalid_argument);
        CHECK(good(exchange.dispatch_send(1, refused[rank].tokens())) == 1);
      }
      if (rank == 2) {
        exchange.skip_step();
      } else {
        CHECK(exchange.check_free(1).error().text ==
              "dispatch_send() in slot 1: dispatch_recv() comes next");
        CHECK(good(exchange.dispatch_wait(1, {})) == Waited::left_out);
      }
      CHECK(exchange.next_step() == 2);
      good(exchange.check_free(1));
      const StepOf next{shape, later, second.of};
      CHECK(whole_step(next, member, 1, Order::by_source) == none);
      member.await_combine(0);
      CHECK(combine_and_check(step, member, 0) == none);
      CHECK(exchange.next_step() == 3);
      CHECK(exchange.lost().empty());
      CHECK(exchange.leave_out(1).error().code == Errc::invalid_argument);
    });
  }
}

// --- ranks that are lost ---------------------------------------------------------------------

TEST_CASE(
    "a rank whose engine ends in any phase costs its contribution, and the next view continues") {
  Random random;
  CAPTURE(random.seed);
  constexpr std::uint32_t kDying = 1;
  for (const Reach& way : all_ways()) {
    CAPTURE(way.fabric);
    CAPTURE(name(way.pairs));
    for (int phase = 0; phase < 5; ++phase) {
      CAPTURE(phase);
      Group group(way.fabric, way.pairs, kThreeRanks);
      const Tables all(kThreeRanks, {true, true, true}, random);
      const Tables left(kThreeRanks, {true, false, true}, random);
      std::vector<std::vector<Given>> given;
      for (int n = 0; n < 3; ++n) given.push_back(random_all(kThreeRanks, random));
      given[2][kDying] = {};
      group.each(group.all(), [&](Member& member) {
        const std::uint32_t rank = member.shape.rank;
        moe::Exchange& exchange = *member.exchange;
        good(exchange.set_view(all.view(1, rank), 0));
        whole_step({kThreeRanks, given[0], all.of}, member, 0, Order::by_expert);
        const StepOf step{kThreeRanks, given[1], all.of};
        if (rank == kDying) {
          Bytes y;
          for (int done = 0; done < phase; ++done) {
            if (done == 0) good(exchange.dispatch_send(1, given[1][rank].tokens()));
            if (done == 1) member.await_dispatch(1);
            if (done == 2) y = place_and_compute(step, member, 1, Order::by_expert);
            if (done == 3) good(exchange.combine_send(1, y.data()));
          }
          member.engine->close();
          const auto after = exchange.dispatch_send(0, {});
          REQUIRE_FALSE(after);
          CHECK(after.error().code == Errc::engine_closed);
          return;
        }
        const std::vector<bool> missing = whole_step(step, member, 1, Order::by_expert);
        CHECK_FALSE(missing[0]);
        CHECK_FALSE(missing[2]);
        bool had_rows = false;
        for (std::size_t token = 0; token < given[1][rank].count; ++token) {
          had_rows |= !step.entries(rank, token, kDying).empty();
        }
        // Over an engine, the rows that it returned before it ended may have arrived or not.
        if (phase < 4) CHECK(missing[kDying] == had_rows);
        if (phase == 4 && way.pairs == Pairs::memory) CHECK_FALSE(missing[kDying]);
        exchange.remove(kDying);
        CHECK(exchange.lost() == std::vector<std::uint32_t>{kDying});
        good(exchange.set_view(left.view(2, rank), 2));
        CHECK(exchange.lost().empty());
        const auto none = whole_step({kThreeRanks, given[2], left.of}, member, 0, Order::by_source);
        CHECK(none == std::vector<bool>(3));
      });
    }
  }
}

TEST_CASE("steps that were posted in a view are posted again in later ones, with their tables") {
  Random random;
  CAPTURE(random.seed);
  for (const Reach& way : all_ways()) {
    CAPTURE(way.fabric);
    CAPTURE(name(way.pairs));
    Group group(way.fabric, way.pairs, kThreeRanks);
    const Tables all(kThreeRanks, {true, true, true}, random);
    const Tables left(kThreeRanks, {true, true, false}, random);
    std::vector<std::vector<Given>> given;
    for (int n = 0; n < 5; ++n) given.push_back(random_all(kThreeRanks, random));
    given[1][2] = given[2][2] = given[3][2] = {};
    group.each(group.all(), [&](Member& member) {
      good(member.exchange->set_view(all.view(1, member.shape.rank), 0));
      whole_step({kThreeRanks, given[0], all.of}, member, 0, Order::by_expert);
      if (member.shape.rank == 2) member.engine->close();
    });
    // When rank 2 is lost, rank 0 has posted two steps, and rank 1 none.
    Member& first = *group.members[0];
    for (std::uint32_t slot = 0; slot < 2; ++slot) {
      good(first.exchange->dispatch_send(slot, given[1 + slot][0].tokens()));
    }
    Waited waited = Waited::events;
    while (waited == Waited::events) {
      first.exchange->events();
      waited = good(first.exchange->dispatch_wait(0, {}));
    }
    CHECK(waited == Waited::deadline);
    CHECK(first.exchange->awaited(0).front() == 1);
    for (const std::uint64_t view : {2U, 3U, 4U}) {
      group.each({0, 1}, [&](Member& member) {
        member.exchange->remove(2);
        good(member.exchange->set_view(left.view(view, member.shape.rank), 1));
      });
    }
    Member& second = *group.members[1];
    CHECK(second.exchange->next_step() == 1);
    for (std::uint32_t slot = 0; slot < 2; ++slot) {
      CHECK(good(second.exchange->dispatch_send(slot, given[1 + slot][1].tokens())) == 1 + slot);
    }
    group.each({0, 1}, [&](Member& member) {
      for (std::uint32_t slot = 0; slot < 2; ++slot) {
        const StepOf step{kThreeRanks, given[1 + slot], left.of};
        member.await_dispatch(slot);
        CHECK(good(member.exchange->arrival(slot))->missing == std::vector<bool>(3));
        const Bytes y = place_and_compute(step, member, slot, Order::by_expert);
        good(member.exchange->combine_send(slot, y.data()));
        member.await_combine(slot);
        CHECK(combine_and_check(step, member, slot) == std::vector<bool>(3));
      }
      whole_step({kThreeRanks, given[3], left.of}, member, 0, Order::by_source);
    });
    // A new process in its place takes part from the first view that has it.
    group.start(2, {0, 1});
    group.each(group.all(), [&](Member& member) {
      good(member.exchange->set_view(all.view(5, member.shape.rank), 4));
      CHECK(member.exchange->next_step() == 4);
      CHECK(member.exchange->lost().empty());
      const StepOf step{kThreeRanks, given[4], all.of};
      CHECK(whole_step(step, member, 0, Order::by_expert) == std::vector<bool>(3));
    });
  }
}

TEST_CASE("a step of an earlier view ends without a rank that came back in the next") {
  Random random;
  CAPTURE(random.seed);
  moe::Shape shape = kThreeRanks;
  shape.ranks = 2;
  shape.local_experts = {3, 3};
  for (const Reach& way : all_ways()) {
    CAPTURE(way.fabric);
    CAPTURE(name(way.pairs));
    Group group(way.fabric, way.pairs, shape);
    const Tables both(shape, {true, true}, random);
    const std::vector<Given> given{random_given(shape, 9, random), random_given(shape, 7, random)};
    const StepOf step{shape, given, both.of};
    Bytes y;
    group.each(group.all(), [&](Member& member) {
      good(member.exchange->set_view(both.view(1, member.shape.rank), 0));
      good(member.exchange->dispatch_send(0, given[member.shape.rank].tokens()));
      member.await_dispatch(0);
      if (member.shape.rank == 1) return member.engine->close();
      while (member.exchange->lost().empty()) {
        pollfd event{.fd = member.engine->event_fd(), .events = POLLIN, .revents = 0};
        ::poll(&event, 1, 1000);
        member.exchange->events();
      }
    });
    Member& left = *group.members[0];
    left.exchange->remove(1);
    group.start(1, {0});
    good(left.exchange->set_view(both.view(2, 0), 1));
    y = place_and_compute(step, left, 0, Order::by_expert);
    good(left.exchange->combine_send(0, y.data()));
    left.await_combine(0);
    CHECK(combine_and_check(step, left, 0)[1]);
    group.each(group.all(), [&](Member& member) {
      if (member.shape.rank == 1) good(member.exchange->set_view(both.view(2, 1), 1));
      CHECK(whole_step(step, member, 0, Order::by_source) == std::vector<bool>(2));
    });
  }
}

// --- several ranks of a host -----------------------------------------------------------------

namespace {

// Ranks 0 and 1 are on one host, 2 and 3 on another. Each token goes to all: rank 2 relays tokens
// of rank 0 to ranks 2 and 3, and rank 3 those of rank 1.
const moe::Shape kTwoHosts{.ranks = 4,
                           .experts = 4,
                           .local_experts = {1, 1, 1, 1},
                           .top_k = 4,
                           .hidden = 1024,
                           .max_tokens = 32};

std::vector<Given> to_all(Random& random) {
  std::vector<Given> given;
  for (std::uint32_t rank = 0; rank < kTwoHosts.ranks; ++rank) {
    given.push_back(random_given(kTwoHosts, kTwoHosts.max_tokens, random));
    for (std::size_t choice = 0; choice < given.back().ids.size(); ++choice) {
      given.back().ids[choice] = static_cast<std::int64_t>(choice % kTwoHosts.top_k);
    }
  }
  return given;
}

}  // namespace

TEST_CASE("a token goes once to a host with several of its ranks") {
  Random random;
  CAPTURE(random.seed);
  const std::vector<Given> given = to_all(random);
  const std::vector<bool> alive(kTwoHosts.ranks, true);
  const Tables tables(kTwoHosts, alive, random);
  const StepOf step{kTwoHosts, given, tables.of};
  const std::size_t rows = kTwoHosts.max_tokens * kTwoHosts.token_row().bytes();
  for (const bool known : {true, false}) {
    Group group("tcp", Pairs::hosts, kTwoHosts);
    group.each(group.all(), [&](Member& member) {
      if (!known) good(member.exchange->set_hosts({0, 1, 2, 3}));
      good(member.exchange->set_view(tables.view(1, member.shape.rank), 0));
      CHECK(whole_step(step, member, 0, Order::by_expert) == std::vector<bool>(kTwoHosts.ranks));
    });
    std::uint64_t received = 0;
    for (const auto& member : group.members) received += member->engine->stats().bytes_received;
    // The rows of each rank, and the results of two ranks of the other host, with up to a sixteenth
    // more for the routes.
    const std::uint64_t wanted = 4 * ((known ? 1 : 2) + 2) * rows;
    CHECK(received > wanted);
    CHECK(received < wanted + wanted / 16);
  }
  Member alone("tcp", kTwoHosts, {});
  CHECK(alone.exchange->set_hosts({0, 0}).error().code == Errc::invalid_argument);
}

TEST_CASE("a relay that ends costs no other rank's tokens") {
  Random random;
  CAPTURE(random.seed);
  constexpr std::uint32_t kDying = 2;
  const std::vector<Given> given = to_all(random);
  const Tables all(kTwoHosts, {true, true, true, true}, random);
  const Tables left(kTwoHosts, {true, true, false, true}, random);
  for (const Reach& way : all_ways()) {
    if (way.pairs != Pairs::hosts) continue;
    CAPTURE(way.fabric);
    for (int phase = 0; phase < 4; ++phase) {
      CAPTURE(phase);
      Group group(way.fabric, way.pairs, kTwoHosts);
      std::atomic<int> sent = 0;
      group.each(group.all(), [&](Member& member) {
        const std::uint32_t rank = member.shape.rank;
        moe::Exchange& exchange = *member.exchange;
        const StepOf step{kTwoHosts, given, all.of};
        good(exchange.set_view(all.view(1, rank), 0));
        whole_step(step, member, 0, Order::by_source);
        if (rank == kDying) {
          Bytes y;
          if (phase > 0) good(exchange.dispatch_send(1, given[rank].tokens()));
          while (sent < 3) std::this_thread::yield();
          if (phase > 1) member.await_dispatch(1);
          if (phase > 2) y = place_and_compute(step, member, 1, Order::by_expert);
          return member.engine->close();
        }
        good(exchange.dispatch_send(1, given[rank].tokens()));
        ++sent;
        member.await_dispatch(1);
        const std::vector<bool> missing = good(exchange.arrival(1))->missing;
        for (const std::uint32_t other : {0U, 1U, 3U}) CHECK_FALSE(missing[other]);
        const Bytes y = place_and_compute(step, member, 1, Order::by_expert);
        good(exchange.combine_send(1, y.data()));
        member.await_combine(1);
        CHECK(combine_and_check(step, member, 1) == std::vector<bool>{false, false, true, false});
        exchange.remove(kDying);
        good(exchange.set_view(left.view(2, rank), 2));
        std::vector<Given> rest = given;
        rest[kDying] = {};
        const auto none = whole_step({kTwoHosts, rest, left.of}, member, 0, Order::by_source);
        CHECK(none == std::vector<bool>(kTwoHosts.ranks));
      });
    }
  }
}

TEST_CASE(
    "a dispatch of the next view that arrives early is found once this rank is in that view") {
  Random random;
  CAPTURE(random.seed);
  const std::vector<Given> given = to_all(random);
  const Tables all(kTwoHosts, {true, true, true, true}, random);
  const Tables left(kTwoHosts, {true, true, true, false}, random);
  Group group("tcp", Pairs::hosts, kTwoHosts);
  const auto adopt = [&](std::uint32_t rank) {
    moe::Exchange& exchange = *group.members[rank]->exchange;
    exchange.remove(3);
    good(exchange.set_view(left.view(2, rank), 0));
  };
  group.each(group.all(), [&](Member& member) {
    good(member.exchange->set_view(all.view(1, member.shape.rank), 0));
    if (member.shape.rank == 3) return member.engine->close();
    good(member.exchange->dispatch_send(0, given[member.shape.rank].tokens()));
  });
  adopt(1);
  REQUIRE(comes_to_rest());
  // Rank 0 relays for rank 2 to rank 1, so rank 2 looks only once for the tokens of rank 1.
  Member& late = *group.members[2];
  Waited waited = Waited::events;
  while (waited == Waited::events) {
    late.exchange->events();
    waited = good(late.exchange->dispatch_wait(0, {}));
  }
  CHECK(waited == Waited::deadline);
  adopt(0);
  adopt(2);
  group.each({0, 1, 2}, [&](Member& member) {
    member.await_dispatch(0);
    CHECK(good(member.exchange->arrival(0))->missing == std::vector<bool>(kTwoHosts.ranks));
  });
}

TEST_SUITE_END();
