// The routes of tokens, and routes received from other ranks.
#include <algorithm>
#include <cstring>

#include "moe/memory_layout.hpp"
#include "moe/routing.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using moe::RouteEntry;
using moe::RouteRow;

TEST_SUITE_BEGIN("moe");

namespace {

constexpr std::int64_t at_rank(std::int64_t rank, std::int64_t local) { return rank << 32 | local; }

const moe::Shape kTwoRanks{.ranks = 2,
                           .rank = 0,
                           .experts = 4,
                           .local_experts = {2, 2},
                           .top_k = 2,
                           .hidden = 8,
                           .max_tokens = 8};

Error why_refused(const Result<void>& result) {
  REQUIRE_FALSE(result);
  return result.error();
}

}  // namespace

TEST_CASE("a token goes once to each rank that has experts of its choice") {
  const std::vector<std::int64_t> table{at_rank(0, 0), at_rank(0, 1), at_rank(1, 1), at_rank(1, 0)};
  const std::vector<std::int64_t> ids{0,  1,   // both here
                                      -1, -1,  // nowhere
                                      3,  0};  // both ranks
  const std::vector<float> weights{0.1F, 0.2F, 0.3F, 0.4F, 0.5F, 0.6F};
  std::vector<moe::Routes> to;
  good(moe::route(kTwoRanks, table, ids, weights, to));
  REQUIRE(to.size() == 2);
  CHECK(to[0].rows == std::vector<RouteRow>{{0, 0}, {2, 2}});
  CHECK(to[0].entries == std::vector<RouteEntry>{{0, 0.1F}, {1, 0.2F}, {0, 0.6F}});
  CHECK(to[1].rows == std::vector<RouteRow>{{2, 0}});
  CHECK(to[1].entries == std::vector<RouteEntry>{{0, 0.5F}});
}

TEST_CASE("a choice without a live replica goes nowhere") {
  const std::vector<std::int64_t> table{-1, at_rank(0, 1), -1, at_rank(1, 0)};
  std::vector<moe::Routes> to;
  good(moe::route(kTwoRanks, table, std::vector<std::int64_t>{0, 2, 3, 2},
                  std::vector<float>{1, 1, 1, 1}, to));
  CHECK(to[0].rows.empty());
  CHECK(to[1].rows == std::vector<RouteRow>{{1, 0}});
}

TEST_CASE("the error names a choice out of range") {
  const std::vector<std::int64_t> table{at_rank(0, 0), at_rank(0, 1), at_rank(1, 0), at_rank(1, 1)};
  const std::vector<float> weights(4, 1.0F);
  std::vector<moe::Routes> to;
  auto error =
      why_refused(moe::route(kTwoRanks, table, std::vector<std::int64_t>{0, 1, 2, 4}, weights, to));
  CHECK(error.code == Errc::invalid_argument);
  CHECK(error.text == "token 1, choice 1: expert 4; ids are 0 to 3, and -1 for no expert");
  error = why_refused(
      moe::route(kTwoRanks, table, std::vector<std::int64_t>{0, -2, 2, 3}, weights, to));
  CHECK(error.text == "token 0, choice 1: expert -2; ids are 0 to 3, and -1 for no expert");
}

TEST_CASE("an expert that a token chooses several times has one entry: its weights add up") {
  moe::Shape shape = kTwoRanks;
  shape.top_k = 4;
  const std::vector<std::int64_t> table{at_rank(0, 0), at_rank(0, 1), at_rank(1, 0), at_rank(1, 1)};
  const std::vector<std::int64_t> ids{1, 3,  1, 0,  // apart, with another rank's choice between
                                      2, 2,  2, 2,  // every choice
                                      3, -1, 3, 2};
  const std::vector<float> weights{0.5F,     2.0F, 0.25F, 8.0F, 1.0F, 0x1p-24F,
                                   0x1p-24F, 3.0F, 0.5F,  9.0F, 1.5F, 1.0F};
  std::vector<moe::Routes> to;
  good(moe::route(shape, table, ids, weights, to));
  CHECK(to[0].rows == std::vector<RouteRow>{{0, 0}});
  CHECK(to[0].entries == std::vector<RouteEntry>{{1, 0.75F}, {0, 8.0F}});
  CHECK(to[1].rows == std::vector<RouteRow>{{0, 0}, {1, 1}, {2, 2}});
  // In the order of the choices, so that each 2^-24 is rounded away.
  CHECK(to[1].entries == std::vector<RouteEntry>{{1, 2.0F}, {0, 4.0F}, {1, 2.0F}, {0, 1.0F}});
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    Bytes bytes(moe::routes_bytes(to[rank].rows.size(), to[rank].entries.size()));
    moe::write_routes(to[rank], bytes.data());
    moe::Routes read;
    CHECK(moe::read_routes(shape, rank, static_cast<std::uint32_t>(to[rank].rows.size()),
                           static_cast<std::uint32_t>(to[rank].entries.size()), bytes.data(),
                           read));
  }
}

TEST_CASE("routes are read as they were written, and refused if they are malformed") {
  const moe::Routes routes{.rows = {{1, 0}, {4, 2}}, .entries = {{0, 1}, {1, 2}, {1, 3}}};
  Bytes bytes(moe::routes_bytes(2, 3));
  moe::write_routes(routes, bytes.data());
  moe::Routes read;
  REQUIRE(moe::read_routes(kTwoRanks, 0, 2, 3, bytes.data(), read));
  CHECK(read.rows == routes.rows);
  CHECK(read.entries == routes.entries);

  const auto malformed = [&](moe::Routes bad) {
    Bytes raw(moe::routes_bytes(bad.rows.size(), bad.entries.size()));
    moe::write_routes(bad, raw.data());
    return !moe::read_routes(kTwoRanks, 0, static_cast<std::uint32_t>(bad.rows.size()),
                             static_cast<std::uint32_t>(bad.entries.size()), raw.data(), read) &&
           read.rows.empty() && read.entries.empty();
  };
  CHECK_FALSE(malformed({.rows = {{0, 0}, {7, 1}}, .entries = {{0, 1}, {1, 1}}}));
  CHECK(malformed({.rows = {{4, 0}, {4, 1}}, .entries = {{0, 1}, {1, 1}}}));  // a token twice
  CHECK(malformed({.rows = {{4, 0}, {1, 1}}, .entries = {{0, 1}, {1, 1}}}));  // falling
  CHECK(malformed({.rows = {{0, 0}, {8, 1}}, .entries = {{0, 1}, {1, 1}}}));  // no such token
  CHECK(malformed({.rows = {{0, 1}, {1, 2}}, .entries = {{0, 1}, {1, 1}}}));  // not from 0 on
  CHECK(malformed({.rows = {{0, 0}, {1, 0}}, .entries = {{0, 1}, {1, 1}}}));  // an empty row
  CHECK(malformed({.rows = {{0, 0}, {1, 9}}, .entries = {{0, 1}, {1, 1}}}));  // beyond the entries
  CHECK(malformed({.rows = {{0, 0}}, .entries = {{0, 1}, {1, 1}, {0, 1}}}));  // more than top_k
  CHECK(malformed({.rows = {{0, 0}}, .entries = {{2, 1}}}));                  // no such expert
  CHECK_FALSE(moe::read_routes(kTwoRanks, 0, 9, 9, bytes.data(), read));      // too many rows
  CHECK_FALSE(moe::read_routes(kTwoRanks, 0, 2, ~0U, bytes.data(), read));    // too many entries
}

TEST_CASE("no bytes give routes outside of the shape") {
  Random random;
  CAPTURE(random.seed);
  for (int round = 0; round < 2000; ++round) {
    const auto rows = static_cast<std::uint32_t>(random.below(10));
    const auto entries = static_cast<std::uint32_t>(random.below(18));
    std::vector<std::uint32_t> words(2 * (rows + entries) + 1);
    for (auto& word : words) word = static_cast<std::uint32_t>(random.below(4));
    moe::Routes read;
    if (!moe::read_routes(kTwoRanks, 0, rows, entries,
                          reinterpret_cast<const std::byte*>(words.data()), read)) {
      continue;
    }
    std::size_t seen = 0;
    for (std::size_t row = 0; row < read.rows.size(); ++row) {
      CHECK(read.rows[row].token < kTwoRanks.max_tokens);
      CHECK(read.of(row).size() <= kTwoRanks.top_k);
      for (const RouteEntry& entry : read.of(row)) CHECK(entry.expert < 2);
      seen += read.of(row).size();
    }
    CHECK(seen == read.entries.size());
  }
}

TEST_CASE("parts of own memory and of an inbox do not overlap") {
  moe::Shape shape = kTwoRanks;
  shape.ranks = 3;
  shape.local_experts = {2, 0, 5};
  const moe::OwnLayout own(shape);
  std::vector<std::pair<std::size_t, std::size_t>> parts{{0, sizeof(moe::OwnHead)}};
  const std::size_t token = shape.token_row().bytes();
  const std::size_t combine = shape.combine_row().bytes();
  for (std::uint32_t slot = 0; slot < shape.slots; ++slot) {
    parts.emplace_back(own.routes_word(slot), sizeof(moe::Word));
    parts.emplace_back(own.rows_word(slot), sizeof(moe::Word));
    parts.emplace_back(own.tokens(slot), shape.max_tokens * token);
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      parts.emplace_back(own.combine_word(slot, rank), sizeof(moe::Word));
      parts.emplace_back(own.message(slot, rank), moe::most_message_bytes(shape, rank));
      parts.emplace_back(own.combine_head(slot, rank), sizeof(moe::MessageHead));
      parts.emplace_back(own.relay_word(slot, rank), sizeof(moe::Word));
      parts.emplace_back(own.relay_head(slot, rank), sizeof(moe::MessageHead));
      parts.emplace_back(own.combine(slot, rank * shape.max_tokens), shape.max_tokens * combine);
    }
  }
  const auto disjoint = [](auto ranges, std::size_t bytes) {
    std::ranges::sort(ranges);
    std::size_t end = 0;
    for (const auto& [begin, length] : ranges) {
      CHECK(begin >= end);
      CHECK(begin % 64 == 0);
      end = begin + length;
    }
    CHECK(end <= bytes);
    CHECK(bytes - end < std::size_t{2} << 20);
  };
  const moe::InboxLayout inbox(shape);
  disjoint(parts, own.own_bytes());
  for (std::size_t number = 0; number < 4; ++number) {
    parts.emplace_back(own.inbox(number), inbox.bytes());
  }
  disjoint(parts, own.bytes());

  parts.clear();
  for (std::uint32_t slot = 0; slot < shape.slots; ++slot) {
    for (const std::uint64_t ordinal : {1U, 2U}) {
      for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
        parts.emplace_back(inbox.message(slot, ordinal, rank),
                           moe::most_message_bytes(shape, rank));
      }
      parts.emplace_back(inbox.combine_head(slot, ordinal), sizeof(moe::MessageHead));
    }
    parts.emplace_back(inbox.tokens(slot), shape.max_tokens * token);
    parts.emplace_back(inbox.combine(slot), shape.max_tokens * combine);
  }
  disjoint(parts, inbox.bytes());
}

TEST_CASE("the error for an invalid shape names its member") {
  const auto why = [](auto change) {
    moe::Shape shape = kTwoRanks;
    change(shape);
    const auto checked = moe::check(shape);
    return checked ? std::string() : checked.error().text;
  };
  CHECK(why([](auto&) {}).empty());
  CHECK(why([](auto& s) { s.rank = 2; }) == "rank is 2; allowed are 0 to 1");
  CHECK(why([](auto& s) { s.top_k = 5; }) == "top_k is 5; allowed are 1 to 4");
  CHECK(why([](auto& s) { s.hidden = 0; }).starts_with("hidden is 0"));
  CHECK(why([](auto& s) { s.max_tokens = 1U << 20; }).starts_with("max_tokens is 1048576"));
  CHECK(why([](auto& s) { s.local_experts.pop_back(); }).starts_with("local_experts has 1"));
  CHECK(why([](auto& s) { s.scale_block = 4; }).starts_with("scale_block needs"));
  CHECK(why([](auto& s) { s.output = moe::DType::f8_e4m3; }).starts_with("combine and output"));
}

TEST_SUITE_END();
