// Steps of MoE exchanges: what arrives, what is combined, and what becomes of both when ranks are
// lost.
#include <array>
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

// By each other's memory, then by engines over the fabrics of the tests that need no devices.
std::vector<Reach> ways() {
  std::vector<Reach> ways{{"tcp", Pairs::memory}};
  for (const std::string fabric : {"tcp", "local", "simulated", "ordered"}) {
    if (why_not(fabric).empty()) ways.push_back({fabric, Pairs::engine});
  }
  return ways;
}

const char* name(Pairs pairs) { return pairs == Pairs::memory ? "memory" : "engine"; }

moe::Shape random_shape(Random& random) {
  moe::Shape shape{.ranks = 2 + static_cast<std::uint32_t>(random.below(3)), .slots = 2};
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

// What every rank has in a view.
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

// A step of one rank from its beginning to its end. By rank: what is missing of its combine.
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
  // All tokens to one expert.
  for (auto& each : given.back()) each = random_given(shape, shape.max_tokens, random, 0);
  group.each(group.all(), [&](Member& member) {
    const std::uint32_t rank = member.shape.rank;
    moe::Exchange& exchange = *member.exchange;
    good(exchange.set_view(tables.view(1, rank), 0));
    const std::vector<bool> none(shape.ranks);
    for (std::size_t n = 0; n < kSteps; n += 2) {
      // Two steps under way at once; every other time the rows lie in the exchange's memory.
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

TEST_CASE("steps of random shapes give what a plain computation gives") {
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

TEST_CASE("a message longer than one write is whole when all of it is here") {
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
    // All choices of a token at one rank.
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

TEST_CASE("a wait of an exchange that does not spin sleeps until something comes") {
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

TEST_CASE("calls out of their order are refused by name, and change nothing") {
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
  CHECK(why(exchange.dispatch_wait(0, {})) == "dispatch_wait in slot 0: it holds no step");
  CHECK(why(exchange.dispatch_wait(2, {})) == "slot 2 of 2");
  Given many = random_given(shape, 17, random);
  CHECK(why(exchange.dispatch_send(0, many.tokens())) == "17 tokens; max_tokens is 16");
  Given wrong = given[0];
  wrong.ids[4] = 6;
  CHECK(why(exchange.dispatch_send(0, wrong.tokens())).starts_with("token 1, choice 1: expert 6"));
  CHECK(good(exchange.dispatch_send(0, given[0].tokens())) == 7);
  CHECK(why(exchange.dispatch_send(0, given[0].tokens())).starts_with("dispatch_send in slot 0"));
  CHECK(why(exchange.place(0, Order::by_expert, {}, nullptr, nullptr, nullptr, nullptr))
            .starts_with("place in slot 0: its step has been sent"));
  CHECK(why(exchange.arrival(0)) == "nothing has arrived in slot 0");
  member.await_dispatch(0);
  CHECK(why(exchange.combine_send(0, nullptr)).starts_with("combine_send in slot 0"));
  CHECK(why(exchange.place(0, Order::by_expert, {}, nullptr, nullptr, nullptr, nullptr)) ==
        "place needs 6 begins, not 0");
  CHECK(why(exchange.set_view(tables.view(2, 0), 7)).starts_with("step 7 has been dispatched"));
  CHECK(why(exchange.set_view(tables.view(1, 0), 8)) == "view 1 does not follow the one before");
  const Bytes y = place_and_compute(step, member, 0, Order::by_expert);
  good(exchange.combine_send(0, y.data()));
  CHECK(why(exchange.combine(0, nullptr)).starts_with("combine in slot 0"));
  member.await_combine(0);
  combine_and_check(step, member, 0);
  whole_step(step, member, 1, Order::by_source);
  CHECK(exchange.next_step() == 9);
}

// --- ranks that are lost ---------------------------------------------------------------------

TEST_CASE(
    "a rank whose engine ends in any phase costs its contribution, and the next view goes on") {
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
        // What it sent back before it ended may have come or not, over an engine.
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

TEST_SUITE_END();
