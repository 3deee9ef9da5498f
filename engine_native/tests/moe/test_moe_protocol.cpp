// Ranks that break the protocol, and rows that change while they are read.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "moe/engine_way.hpp"
#include "moe/local_way.hpp"
#include "moe/moe_group.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

TEST_SUITE_BEGIN("moe");

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
