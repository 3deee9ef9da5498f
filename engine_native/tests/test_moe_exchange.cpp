// Steps of MoE exchanges: what arrives, what is combined, and how both change when ranks are lost.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include "moe/engine_way.hpp"
#include "moe/local_way.hpp"
#include "moe_group.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using kvxfer::moe::DType;
using kvxfer::moe::Order;
using kvxfer::moe::Waited;

TEST_SUITE_BEGIN("moe");

namespace {

struct Reach {
  std::string fabric;
  Pairs pairs;
};

// Ranks that reach each other by memory, then by engines over each fabric of this run.
std::vector<Reach> ways() {
  std::vector<Reach> ways;
  if (why_not("tcp").empty()) ways.push_back({"tcp", Pairs::memory});
  for (const std::string& fabric : all_fabrics()) {
    if (!why_not(fabric).empty()) continue;
    ways.push_back({fabric, Pairs::engine});
    ways.push_back({fabric, Pairs::hosts});
  }
  return ways;
}

const char* name(Pairs pairs) {
  if (pairs == Pairs::hosts) return "hosts";
  return pairs == Pairs::memory ? "memory" : "engine";
}

moe::Shape random_shape(Random& random) {
  moe::Shape shape{.ranks = 2 + static_cast<std::uint32_t>(random.below(4)), .slots = 2};
  std::uint32_t physical = 0;
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    shape.local_experts.push_back(static_cast<std::uint32_t>(random.below(6)));
    physical += shape.local_experts.back();
  }
  if (physical == 0) physical = shape.local_experts[0] = 1;
  shape.experts = 1 + static_cast<std::uint32_t>(random.below(physical));
  shape.top_k = 1 + static_cast<std::uint32_t>(random.below(std::min(shape.experts, 5U)));
  constexpr std::array<std::uint32_t, 5> kHidden{1, 17, 32, 64, 200};
  shape.hidden = kHidden[random.below(kHidden.size())];
  shape.max_tokens = 1 + static_cast<std::uint32_t>(random.below(40));
  constexpr std::array<DType, 3> kDtypes{DType::f32, DType::bf16, DType::f16};
  shape.input = kDtypes[random.below(3)];
  shape.wire = random.below(2) == 0 ? shape.input : kDtypes[random.below(3)];
  shape.combine = kDtypes[random.below(3)];
  shape.output = kDtypes[random.below(3)];
  if (random.below(3) == 0) {
    shape.wire = DType::f8_e4m3;
    if (random.below(2) == 0) shape.input = DType::f8_e4m3;
    shape.scale_block = 1 + static_cast<std::uint32_t>(random.below(shape.hidden));
  }
  return shape;
}

const moe::Shape kThreeRanks{.ranks = 3,
                             .experts = 6,
                             .local_experts = {2, 2, 2},
                             .top_k = 3,
                             .hidden = 64,
                             .max_tokens = 16,
                             .slots = 2,
                             .input = DType::f32,
                             .wire = DType::f32,
                             .combine = DType::f32,
                             .output = DType::f32};

// Each rank's table in a view.
struct Tables {
  Tables(const moe::Shape& shape, const std::vector<bool>& ranks, Random& random) : alive(ranks) {
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      of.push_back(random_table(shape, alive, random));
    }
  }
  moe::View view(std::uint64_t number, std::uint32_t rank) const {
    return {.number = number, .alive = alive, .table = of[rank]};
  }
  std::vector<bool> alive;
  std::vector<std::vector<std::int64_t>> of;
};

std::vector<Given> random_all(const moe::Shape& shape, Random& random) {
  std::vector<Given> given;
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    const bool none = random.below(6) == 0;
    given.push_back(random_given(shape, none ? 0 : random.below(shape.max_tokens + 1), random));
  }
  return given;
}

// Runs a whole step of one rank. Returns, by rank, whether it is missing in its combine.
std::vector<bool> whole_step(const StepOf& step, Member& member, std::uint32_t slot, Order order) {
  good(member.exchange->dispatch_send(slot, step.given[member.shape.rank].tokens()));
  member.await_dispatch(slot);
  const Bytes y = place_and_compute(step, member, slot, order);
  good(member.exchange->combine_send(slot, y.data()));
  member.await_combine(slot);
  return combine_and_check(step, member, slot);
}

void run_random_group(const Reach& way, Random& random, Duration spin) {
  const moe::Shape shape = random_shape(random);
  Group group(way.fabric, way.pairs, shape, spin);
  const Tables tables(shape, std::vector<bool>(shape.ranks, true), random);
  constexpr std::size_t kSteps = 6;
  std::vector<std::vector<Given>> given;
  std::vector<Order> orders;
  for (std::size_t step = 0; step < kSteps; ++step) {
    given.push_back(random_all(shape, random));
    orders.push_back(random.below(2) == 0 ? Order::by_expert : Order::by_source);
  }
  // All tokens of the last step go to one expert.
  for (auto& each : given.back()) each = random_given(shape, shape.max_tokens, random, 0);
  group.each(group.all(), [&](Member& member) {
    const std::uint32_t rank = member.shape.rank;
    moe::Exchange& exchange = *member.exchange;
    good(exchange.set_view(tables.view(1, rank), 0));
    const std::vector<bool> none(shape.ranks);
    for (std::size_t n = 0; n < kSteps; n += 2) {
      // Two steps are under way at once; every second time the rows are in the exchange's memory.
      std::array<Bytes, 2> y;
      for (std::uint32_t slot = 0; slot < 2; ++slot) {
        const Given& own = given[n + slot][rank];
        moe::Tokens tokens = own.tokens();
        if (n % 4 == 0 && !own.x.empty()) {
          std::byte* const input = good(exchange.input(slot));
          std::memcpy(input, own.x.data(), own.x.size());
          tokens.x = input;
        }
        CHECK(good(exchange.dispatch_send(slot, tokens)) == n + slot);
      }
      for (std::uint32_t slot = 0; slot < 2; ++slot) {
        const StepOf step{shape, given[n + slot], tables.of};
        member.await_dispatch(slot);
        CHECK(good(exchange.arrival(slot))->missing == none);
        y[slot] = place_and_compute(step, member, slot, orders[n + slot]);
        good(exchange.combine_send(slot, y[slot].data()));
      }
      for (std::uint32_t slot = 0; slot < 2; ++slot) {
        const StepOf step{shape, given[n + slot], tables.of};
        member.await_combine(slot);
        CHECK(combine_and_check(step, member, slot) == none);
      }
    }
    CHECK(exchange.next_step() == kSteps);
    CHECK(exchange.lost().empty());
  });
}

}  // namespace

TEST_CASE("steps of random shapes equal a plain computation") {
  Random random;
  CAPTURE(random.seed);
  for (const Reach& way : ways()) {
    CAPTURE(way.fabric);
    CAPTURE(name(way.pairs));
    const int groups = way.pairs == Pairs::memory ? 12 : 4;
    for (int i = 0; i < groups; ++i) {
      run_random_group(way, random, i % 2 == 0 ? Duration::zero() : std::chrono::microseconds(200));
    }
  }
}

TEST_CASE("rows in answers() are placed, computed and sent back in place") {
  Random random;
  CAPTURE(random.seed);
  const moe::Shape shape{.ranks = 3,
                         .experts = 12,
                         .local_experts = {5, 4, 6},
                         .top_k = 4,
                         .hidden = 96,
                         .max_tokens = 20};
  for (const Reach& way : ways()) {
    CAPTURE(way.fabric);
    CAPTURE(name(way.pairs));
    Group group(way.fabric, way.pairs, shape);
    const Tables tables(shape, std::vector<bool>(shape.ranks, true), random);
    std::vector<std::vector<Given>> given;
    for (int n = 0; n < 6; ++n) {
      // There are so few tokens that there is room for the gaps between sources.
      given.emplace_back();
      for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
        given.back().push_back(random_given(shape, random.below(shape.max_tokens - 1), random));
      }
    }
    group.each(group.all(), [&](Member& member) {
      const std::uint32_t rank = member.shape.rank;
      moe::Exchange& exchange = *member.exchange;
      good(exchange.set_view(tables.view(1, rank), 0));
      // Rows of the previous step must not be taken for rows of this one.
      for (std::size_t n = 0; n < given.size(); ++n) {
        const StepOf step{shape, given[n], tables.of};
        std::byte* const answers = good(exchange.answers(0));
        good(exchange.dispatch_send(0, given[n][rank].tokens()));
        member.await_dispatch(0);
        const Bytes y = place_and_compute(step, member, 0, Order::by_source, answers);
        std::memcpy(answers, y.data(), y.size());
        good(exchange.combine_send(0, answers));
        member.await_combine(0);
        CHECK(combine_and_check(step, member, 0) == std::vector<bool>(shape.ranks));
      }
    });
  }
}

TEST_CASE("answers() takes all rows in the order of sources, and no other rows") {
  Random random;
  CAPTURE(random.seed);
  const moe::Shape shape{
      .ranks = 1, .experts = 2, .local_experts = {2}, .top_k = 2, .hidden = 32, .max_tokens = 4};
  Group group("tcp", Pairs::memory, shape);
  moe::Exchange& exchange = *group.members[0]->exchange;
  const Tables tables(shape, {true}, random);
  good(exchange.set_view(tables.view(1, 0), 0));
  const Given given = random_given(shape, 3, random, 0);
  good(exchange.dispatch_send(0, given.tokens()));
  group.members[0]->await_dispatch(0);
  std::byte* const answers = good(exchange.answers(0));
  std::vector<std::int32_t> ids(8 * shape.top_k);
  std::vector<float> weights(8 * shape.top_k);
  const auto place = [&](Order order, std::vector<std::int64_t> begins, std::byte* x) {
    const auto placed = exchange.place(0, order, begins, x, nullptr, ids.data(), weights.data());
    return placed ? std::string() : placed.error().text;
  };
  CHECK(place(Order::by_expert, {0, 3}, answers).starts_with("rows in answers()"));
  CHECK(place(Order::by_source, {0}, answers + 64).starts_with("rows in answers()"));
  CHECK(place(Order::by_source, {2}, answers).starts_with("answers() has 4 rows"));
  CHECK(place(Order::by_source, {1}, answers).empty());
  CHECK(exchange.combine_send(0, answers + 64).error().text.starts_with("rows in answers()"));
  good(exchange.combine_send(0, answers));
  // Rows with padding cannot be in answers().
  moe::Shape padded = shape;
  padded.hidden = 33;
  Group other("tcp", Pairs::memory, padded);
  CHECK(good(other.members[0]->exchange->answers(0)) == nullptr);
}

TEST_CASE("a message longer than one write is complete when all of it has arrived") {
  Random random;
  CAPTURE(random.seed);
  moe::Shape shape{.ranks = 2,
                   .experts = 32,
                   .local_experts = {16, 16},
                   .top_k = 16,
                   .hidden = 2,
                   .max_tokens = 12000,
                   .slots = 1};
  REQUIRE(moe::most_message_bytes(shape, 0) > std::size_t{1} << 20);
  for (const Reach& way : ways()) {
    CAPTURE(way.fabric);
    Group group(way.fabric, way.pairs, shape);
    const Tables tables(shape, {true, true}, random);
    // All choices of a token are at one rank.
    std::vector<Given> given(2);
    given[0].count = shape.max_tokens;
    given[0].x.resize(shape.max_tokens * 4);
    std::int64_t chosen = 0;
    for (std::int64_t id = 0; given[0].ids.size() < std::size_t{shape.max_tokens} * 16; ++id) {
      chosen = id % 32;
      if (tables.of[0][static_cast<std::size_t>(chosen)] >> 32 == 1) given[0].ids.push_back(chosen);
    }
    given[0].weights.resize(given[0].ids.size(), 0.5F);
    group.each(group.all(), [&](Member& member) {
      const std::uint32_t rank = member.shape.rank;
      good(member.exchange->set_view(tables.view(1, rank), 0));
      good(member.exchange->dispatch_send(0, given[rank].tokens()));
      member.await_dispatch(0);
      const auto arrival = *good(member.exchange->arrival(0));
      CHECK(arrival.source_rows[0] == (rank == 1 ? 12000 : 0));
      if (rank == 1) CHECK(arrival.expert_rows == std::vector<std::int64_t>(16, 12000));
    });
  }
}

TEST_CASE("a wait of an exchange that does not spin sleeps until something arrives") {
  for (const Reach& way : ways()) {
    CAPTURE(way.fabric);
    Random random;
    moe::Shape shape = kThreeRanks;
    shape.ranks = 2;
    shape.local_experts = {3, 3};
    Group group(way.fabric, way.pairs, shape);
    const Tables tables(shape, {true, true}, random);
    const std::vector<Given> given = random_all(shape, random);
    const StepOf step{shape, given, tables.of};
    std::thread first([&] {
      group.each({0}, [&](Member& member) {
        good(member.exchange->set_view(tables.view(1, 0), 0));
        whole_step(step, member, 0, Order::by_expert);
      });
    });
    CHECK(comes_to_rest());
    group.each({1}, [&](Member& member) {
      good(member.exchange->set_view(tables.view(1, 1), 0));
      whole_step(step, member, 0, Order::by_expert);
    });
    first.join();
  }
}

TEST_CASE("many short steps of ranks that sleep: no ring of a doorbell is missed") {
  Random random;
  CAPTURE(random.seed);
  for (const Reach& way : ways()) {
    CAPTURE(way.fabric);
    Group group(way.fabric, way.pairs, kThreeRanks);
    const Tables tables(kThreeRanks, {true, true, true}, random);
    const std::vector<Given> given = random_all(kThreeRanks, random);
    const StepOf step{kThreeRanks, given, tables.of};
    group.each(group.all(), [&](Member& member) {
      good(member.exchange->set_view(tables.view(1, member.shape.rank), 0));
      for (std::uint32_t n = 0; n < 200; ++n) {
        moe::Exchange& exchange = *member.exchange;
        good(exchange.dispatch_send(n % 2, given[member.shape.rank].tokens()));
        member.await_dispatch(n % 2);
        if (n % 50 == 0) {
          const Bytes y = place_and_compute(step, member, n % 2, Order::by_source);
          good(exchange.combine_send(n % 2, y.data()));
          member.await_combine(n % 2);
          combine_and_check(step, member, n % 2);
          continue;
        }
        const auto arrival = *good(exchange.arrival(n % 2));
        Bytes room(std::size_t{16} * 3 * 64 * 4);
        std::vector<std::int32_t> ids(std::size_t{16} * 3 * 3);
        std::vector<float> weights(ids.size());
        good(exchange.place(n % 2, Order::by_source, std::vector<std::int64_t>{0, 16, 32},
                            room.data(), nullptr, ids.data(), weights.data()));
        good(exchange.combine_send(n % 2, room.data()));
        member.await_combine(n % 2);
        Bytes out(std::size_t{16} * 64 * 4);
        good(exchange.combine(n % 2, out.data()));
      }
    });
  }
}

TEST_CASE("the error names a call out of order, which changes nothing") {
  Random random;
  CAPTURE(random.seed);
  moe::Shape shape = kThreeRanks;
  shape.ranks = 1;
  shape.local_experts = {6};
  Group group("tcp", Pairs::memory, shape);
  Member& member = *group.members[0];
  moe::Exchange& exchange = *member.exchange;
  const Tables tables(shape, {true}, random);
  const std::vector<Given> given{random_given(shape, 5, random)};
  const StepOf step{shape, given, tables.of};
  const auto why = [](const auto& result) {
    REQUIRE_FALSE(result);
    CHECK(result.error().code == Errc::invalid_argument);
    return result.error().text;
  };
  CHECK(why(exchange.dispatch_send(0, given[0].tokens())) == "dispatch_send before set_view");
  good(exchange.set_view(tables.view(1, 0), 7));
  CHECK(why(exchange.dispatch_wait(0, {})) ==
        "dispatch_recv() in slot 0: it holds no step; dispatch_send() begins one");
  CHECK(why(exchange.dispatch_wait(2, {})) == "slot 2 of 2");
  Given many = random_given(shape, 17, random);
  CHECK(why(exchange.dispatch_send(0, many.tokens())) == "17 tokens; max_tokens is 16");
  Given wrong = given[0];
  wrong.ids[4] = 6;
  CHECK(why(exchange.dispatch_send(0, wrong.tokens())).starts_with("token 1, choice 1: expert 6"));
  CHECK(good(exchange.dispatch_send(0, given[0].tokens())) == 7);
  CHECK(why(exchange.dispatch_send(0, given[0].tokens())) ==
        "dispatch_send() in slot 0: dispatch_recv() comes next");
  CHECK(why(exchange.place(0, Order::by_expert, {}, nullptr, nullptr, nullptr, nullptr)) ==
        "dispatch_recv() in slot 0: dispatch_recv() comes next");
  CHECK(why(exchange.arrival(0)) == "nothing has arrived in slot 0");
  member.await_dispatch(0);
  CHECK(why(exchange.combine_send(0, nullptr)) ==
        "combine_send() in slot 0: dispatch_recv() comes next");
  CHECK(why(exchange.place(0, Order::by_expert, {}, nullptr, nullptr, nullptr, nullptr)) ==
        "place needs 6 begins, not 0");
  CHECK(why(exchange.set_view(tables.view(2, 0), 7)).starts_with("step 7 has been dispatched"));
  CHECK(why(exchange.set_view(tables.view(1, 0), 8)) == "view 1 does not follow the one before");
  const Bytes y = place_and_compute(step, member, 0, Order::by_expert);
  good(exchange.combine_send(0, y.data()));
  CHECK(why(exchange.combine(0, nullptr)) == "combine_recv() in slot 0: combine_recv() comes next");
  member.await_combine(0);
  combine_and_check(step, member, 0);
  whole_step(step, member, 1, Order::by_source);
  CHECK(exchange.next_step() == 9);
}

// --- refused steps ---------------------------------------------------------------------------

namespace {

Given with_a_bad_choice(const moe::Shape& shape, Random& random) {
  Given given = random_given(shape, 1, random);
  given.ids.back() = shape.experts;
  return given;
}

}  // namespace

TEST_CASE("a step that is left out frees its slot, and concurrent steps are run in the next view") {
  for (const Reach& way : ways()) {
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
  for (const Reach& way : ways()) {
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
  for (const Reach& way : ways()) {
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

TEST_CASE("steps that were posted in a view are posted again in later ones, with their tables") {
  Random random;
  CAPTURE(random.seed);
  for (const Reach& way : ways()) {
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
  for (const Reach& way : ways()) {
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

// --- ranks that break the protocol -----------------------------------------------------------

namespace {

// A rank 1 that sends whatever a test says, and rank 0.
struct Liar {
  explicit Liar(Pairs pairs, const std::string& fabric)
      : honest(fabric, with_rank(0), {}),
        engine(options_for(fabric, "liar")),
        own(good(moe::OwnMemory::create(with_rank(1)))),
        to_honest(engine.connect_to(honest.engine)) {
    moe::Exchange& exchange = *honest.exchange;
    const PeerId to_liar = honest.await_peer_up();
    if (pairs == Pairs::memory) {
      good(exchange.add_local(1, to_liar, UniqueFd(::dup(own.memory_fd())), own.layout().bytes(),
                              UniqueFd(::dup(own.doorbell_fd()))));
    } else {
      way = good(moe::EngineWay::open(*engine, with_rank(1), 0, to_honest, own, kDeadline));
      good(exchange.add_remote(1, to_liar, way->terms()));
      good(way->accept(good(exchange.open_remote(1, to_liar)),
                       good(engine->register_memory(own.at(0), own.own_bytes().size()))));
    }
    moe::View view{.number = 1, .alive = {true, true}};
    for (std::int64_t expert = 0; expert < 6; ++expert) {
      view.table.push_back(expert % 2 << 32 | expert / 2);
    }
    good(exchange.set_view(view, 0));
    good(exchange.dispatch_send(0, {}));
  }
  static moe::Shape with_rank(std::uint32_t rank) {
    moe::Shape shape = kThreeRanks;
    shape.ranks = 2;
    shape.rank = rank;
    shape.local_experts = {3, 3};
    return shape;
  }
  void dispatch(const moe::Routes& routes, std::uint32_t rows) {
    const std::uint64_t key = moe::key_of(1, 0);
    const std::size_t message = own.layout().message(0, 0);
    moe::write_routes(routes, own.at(message + sizeof(moe::MessageHead)));
    own.head(message) = {
        .key = key, .rows = rows, .entries = static_cast<std::uint32_t>(routes.entries.size())};
    own.publish(own.layout().routes_word(0), key);
    own.publish(own.layout().rows_word(0), key);
    std::vector<OperationId> operations;
    std::vector<std::int64_t> tokens;
    for (const moe::RouteRow& row : routes.rows) tokens.push_back(row.token);
    if (way) good(way->post_dispatch(0, {tokens, {}}, operations));
  }
  void check_lost() {
    honest.await_dispatch(0);
    const auto arrival = *good(honest.exchange->arrival(0));
    CHECK(arrival.missing == std::vector<bool>{false, true});
    CHECK(arrival.source_rows == std::vector<std::int64_t>{0, 0});
    CHECK(honest.exchange->lost() == std::vector<std::uint32_t>{1});
    CHECK(honest.exchange->why_lost(1).code == Errc::protocol_error);
  }

  Member honest;
  TestEngine engine;
  moe::OwnMemory own;
  PeerId to_honest;
  std::unique_ptr<moe::EngineWay> way;
};

}  // namespace

TEST_CASE("a rank that sends malformed routes is lost, and none of its rows are placed") {
  for (const Pairs pairs : {Pairs::memory, Pairs::engine}) {
    CAPTURE(name(pairs));
    const moe::Routes routes{.rows = {{0, 0}, {1, 1}}, .entries = {{0, 1}, {2, 1}}};
    Liar honest(pairs, "tcp");
    honest.dispatch(routes, 2);
    honest.honest.await_dispatch(0);
    CHECK(good(honest.honest.exchange->arrival(0))->source_rows == std::vector<std::int64_t>{0, 2});
    Liar of_rows(pairs, "tcp");
    of_rows.dispatch(routes, 1U << 31);
    of_rows.check_lost();
    Liar of_experts(pairs, "tcp");
    of_experts.dispatch({.rows = {{0, 0}}, .entries = {{3, 1}}}, 1);
    of_experts.check_lost();
  }
}

TEST_CASE("terms and memory of another shape are refused") {
  Group group("tcp", Pairs::engine, kThreeRanks);
  moe::Exchange& exchange = *group.members[0]->exchange;
  moe::Shape other = kThreeRanks;
  other.hidden = 32;
  other.rank = 1;
  Member foreign("tcp", other, {});
  const PeerId peer = group.members[0]->engine.connect_to(foreign.engine);
  const PeerId back = foreign.await_peer_up();
  exchange.remove(1);
  auto added = exchange.add_remote(1, peer, good(foreign.exchange->open_remote(0, back)));
  REQUIRE_FALSE(added);
  CHECK(added.error().code == Errc::protocol_error);
  exchange.remove(1);
  added = exchange.add_local(1, peer, UniqueFd(::dup(foreign.exchange->memory_fd())),
                             foreign.exchange->memory_bytes(),
                             UniqueFd(::dup(foreign.exchange->doorbell_fd())));
  REQUIRE_FALSE(added);
  CHECK(added.error().code == Errc::protocol_error);
}

// Rank 1, and its memory as rank 0 maps it.
struct Mapped {
  static Mapped create() {
    moe::OwnMemory own = good(moe::OwnMemory::create(Liar::with_rank(1)));
    auto way = good(moe::LocalWay::map(Liar::with_rank(0), 1, UniqueFd(::dup(own.memory_fd())),
                                       own.layout().bytes(), UniqueFd(::dup(own.doorbell_fd()))));
    return {.own = std::move(own), .way = std::move(way)};
  }
  std::size_t word() const { return own.layout().rows_word(0); }
  bool whole(std::uint64_t key) const { return way->dispatched(0, key) == moe::Held::whole; }
  bool still(std::uint64_t key) const { return way->still(0, moe::Direction::dispatch, key); }

  moe::OwnMemory own;
  std::unique_ptr<moe::LocalWay> way;
};

TEST_CASE("rows count from their publication until they are withdrawn") {
  const Mapped rank = Mapped::create();
  CHECK_FALSE(rank.whole(1));
  rank.own.publish(rank.word(), 1);
  CHECK(rank.whole(1));
  CHECK(rank.still(1));
  rank.own.withdraw(rank.word());
  CHECK_FALSE(rank.still(1));
  rank.own.publish(rank.word(), 2);
  CHECK_FALSE(rank.still(1));
  CHECK(rank.still(2));
}

TEST_CASE("a copy of rows that their owner overwrites meanwhile does not count") {
  const Mapped rank = Mapped::create();
  const moe::Shape shape = Liar::with_rank(1);
  const std::size_t bytes = shape.max_tokens * shape.token_row().bytes();
  std::atomic<std::uint64_t> newest = 0;
  std::atomic<std::uint64_t> seen = 0;
  std::atomic<bool> stop = false;
  // Overwrites the rows of every second key at once, and the other rows when they have been seen.
  std::thread owner([&] {
    for (std::uint64_t key = 1; !stop; ++key) {
      rank.own.withdraw(rank.word());
      std::memset(rank.own.at(rank.own.layout().tokens(0)), static_cast<int>(key % 251), bytes);
      rank.own.publish(rank.word(), key);
      newest = key;
      while (key % 2 == 0 && seen < key && !stop) std::this_thread::yield();
    }
  });
  int counted = 0;
  Bytes copy(bytes);
  const auto end = std::chrono::steady_clock::now() + kDeadline;
  while (counted < 1000 && std::chrono::steady_clock::now() < end) {
    const std::uint64_t key = newest;
    if (key == 0 || !rank.whole(key)) continue;
    std::memcpy(copy.data(), rank.way->tokens(0), bytes);
    if (!rank.still(key)) continue;
    ++counted;
    seen = key;
    CHECK(std::ranges::all_of(copy, [&](std::byte b) { return b == std::byte(key % 251); }));
  }
  stop = true;
  owner.join();
  CHECK(counted == 1000);
}

TEST_SUITE_END();
