// Steps of MoE exchanges within one view: what arrives, what is combined, and calls out of order.
#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "moe/moe_group.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using kvxfer::moe::DType;
using kvxfer::moe::Order;

TEST_SUITE_BEGIN("moe");

namespace {

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
  for (const Reach& way : all_ways()) {
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
  for (const Reach& way : all_ways()) {
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
  for (const Reach& way : all_ways()) {
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
  for (const Reach& way : all_ways()) {
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
  for (const Reach& way : all_ways()) {
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

TEST_SUITE_END();
