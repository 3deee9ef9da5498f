#include "moe/moe_group.hpp"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <future>
#include <numeric>

namespace kvxfer::test {

using moe::DType;
using moe::Order;

float load(DType type, const std::byte* from, std::size_t element) {
  from += element * moe::size_of(type);
  std::uint32_t bits = 0;
  std::memcpy(&bits, from, moe::size_of(type));
  switch (type) {
    case DType::f32:
      return std::bit_cast<float>(bits);
    case DType::bf16:
      return moe::f32_of_bf16(static_cast<std::uint16_t>(bits));
    case DType::f16:
      return moe::f32_of_f16(static_cast<std::uint16_t>(bits));
    case DType::f8_e4m3:
      break;
  }
  return moe::f32_of_e4m3(static_cast<std::uint8_t>(bits));
}

void store(DType type, std::byte* to, std::size_t element, float value) {
  std::uint32_t bits = 0;
  switch (type) {
    case DType::f32:
      bits = std::bit_cast<std::uint32_t>(value);
      break;
    case DType::bf16:
      bits = moe::bf16_of_f32(value);
      break;
    case DType::f16:
      bits = moe::f16_of_f32(value);
      break;
    case DType::f8_e4m3:
      bits = moe::e4m3_of_f32(value);
      break;
  }
  std::memcpy(to + element * moe::size_of(type), &bits, moe::size_of(type));
}

namespace {

float rounded(DType type, float value) {
  std::array<std::byte, 4> bytes{};
  store(type, bytes.data(), 0, value);
  return load(type, bytes.data(), 0);
}

std::size_t elements(const moe::Shape& shape) { return shape.hidden; }

}  // namespace

// --- members ---------------------------------------------------------------------------------

Member::Member(const std::string& fabric, const moe::Shape& of, Duration spin)
    : shape(of),
      engine(options_for(fabric, "rank" + std::to_string(of.rank))),
      peers(of.ranks),
      exchange(good(moe::Exchange::create(*engine, of, {.spin = spin, .timeout = kDeadline}))) {}

void Member::await_dispatch(std::uint32_t slot) {
  moe::Waited waited = moe::Waited::events;
  while (waited == moe::Waited::events) {
    exchange->events();
    waited = good(exchange->dispatch_wait(slot, kDeadline));
  }
  REQUIRE(waited == moe::Waited::done);
}

void Member::await_combine(std::uint32_t slot) {
  moe::Waited waited = moe::Waited::events;
  while (waited == moe::Waited::events) {
    exchange->events();
    waited = good(exchange->combine_wait(slot, kDeadline));
  }
  REQUIRE(waited == moe::Waited::done);
}

PeerId Member::await_peer_up() {
  while (true) {
    for (const Completion& completion : exchange->events()) {
      if (completion.kind == Completion::Kind::peer_up) return completion.peer;
    }
    pollfd event{.fd = engine->event_fd(), .events = POLLIN, .revents = 0};
    REQUIRE(::poll(&event, 1, 120'000) == 1);
  }
}

Group::Group(const std::string& fabric, Pairs pairs, moe::Shape shape, Duration spin)
    : members(shape.ranks), fabric_(fabric), pairs_(pairs), shape_(std::move(shape)), spin_(spin) {
  std::vector<std::uint32_t> others;
  for (std::uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    start(rank, others);
    others.push_back(rank);
  }
}

namespace {

std::uint32_t host_of(std::uint32_t rank) { return rank / 2; }

}  // namespace

void Group::start(std::uint32_t rank, const std::vector<std::uint32_t>& others) {
  shape_.rank = rank;
  members[rank] = std::make_unique<Member>(fabric_, shape_, spin_);
  const auto dup_of = [](int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); };
  const auto pair = [&](Member& from, Member& to) {
    const PeerId peer = from.peers[to.shape.rank];
    const PeerId back = to.peers[from.shape.rank];
    if (pairs_ == Pairs::memory ||
        (pairs_ == Pairs::hosts && host_of(from.shape.rank) == host_of(to.shape.rank))) {
      good(from.exchange->add_local(to.shape.rank, peer, dup_of(to.exchange->memory_fd()),
                                    to.exchange->memory_bytes(),
                                    dup_of(to.exchange->doorbell_fd())));
    } else {
      good(from.exchange->add_remote(to.shape.rank, peer,
                                     good(to.exchange->open_remote(from.shape.rank, back))));
    }
  };
  Member& fresh = *members[rank];
  if (pairs_ == Pairs::hosts) {
    std::vector<std::uint32_t> hosts;
    for (std::uint32_t each = 0; each < shape_.ranks; ++each) hosts.push_back(host_of(each));
    good(fresh.exchange->set_hosts(hosts));
  }
  for (const std::uint32_t other : others) {
    fresh.peers[other] = fresh.engine.connect_to(members[other]->engine);
    members[other]->peers[rank] = members[other]->await_peer_up();
    pair(fresh, *members[other]);
    pair(*members[other], fresh);
  }
}

std::vector<std::uint32_t> Group::all() const {
  std::vector<std::uint32_t> ranks(members.size());
  std::iota(ranks.begin(), ranks.end(), 0U);
  return ranks;
}

void Group::each(const std::vector<std::uint32_t>& ranks,
                 const std::function<void(Member& member)>& what) {
  std::vector<std::future<void>> running;
  for (const std::uint32_t rank : ranks) {
    running.push_back(std::async(std::launch::async, [&, rank] { what(*members[rank]); }));
  }
  for (auto& each : running) each.wait();
  for (auto& each : running) each.get();
}

// --- ways ------------------------------------------------------------------------------------

std::vector<Reach> all_ways() {
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

// --- expected results ------------------------------------------------------------------------

moe::Tokens Given::tokens() const {
  return {.x = x.data(),
          .x_scales = scales.empty() ? nullptr : scales.data(),
          .count = count,
          .ids = ids.data(),
          .weights = weights.data()};
}

Given random_given(const moe::Shape& shape, std::size_t count, Random& random, std::int64_t only) {
  Given given{.count = count};
  given.x.resize(count * shape.hidden * moe::size_of(shape.input));
  for (std::size_t i = 0; i < count * shape.hidden; ++i) {
    store(shape.input, given.x.data(), i, static_cast<float>(random.below(4001)) / 1000.0F - 2.0F);
  }
  if (shape.input == DType::f8_e4m3 && shape.scale_block > 0) {
    given.scales.resize(count * shape.token_row().scales());
    for (float& scale : given.scales) scale = static_cast<float>(random.below(16) + 1) / 8.0F;
  }
  for (std::size_t token = 0; token < count; ++token) {
    auto choices = random.distinct_pages(shape.top_k, shape.experts);
    for (std::size_t k = 0; k < shape.top_k; ++k) {
      if (random.below(6) == 0) choices[k] = choices[random.below(shape.top_k)];
      const bool none = random.below(8) == 0;
      const std::int64_t chosen = only >= 0 ? (k == 0 ? only : -1) : choices[k];
      given.ids.push_back(none && only < 0 ? -1 : chosen);
      given.weights.push_back(static_cast<float>(random.below(1000)) / 1000.0F);
    }
  }
  return given;
}

std::vector<Given> random_all(const moe::Shape& shape, Random& random) {
  std::vector<Given> given;
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    const bool none = random.below(6) == 0;
    given.push_back(random_given(shape, none ? 0 : random.below(shape.max_tokens + 1), random));
  }
  return given;
}

std::vector<std::int64_t> random_table(const moe::Shape& shape, const std::vector<bool>& alive,
                                       Random& random) {
  std::vector<std::int64_t> physical;
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    for (std::int64_t local = 0; alive[rank] && local < shape.local_experts[rank]; ++local) {
      physical.push_back(std::int64_t{rank} << 32 | local);
    }
  }
  std::shuffle(physical.begin(), physical.end(), random.engine);
  physical.resize(shape.experts, -1);
  return physical;
}

std::vector<float> StepOf::placed(std::uint32_t source, std::size_t token) const {
  const Given& from = given[source];
  const std::size_t n = elements(shape);
  std::vector<float> row(n);
  for (std::size_t i = 0; i < n; ++i) row[i] = load(shape.input, from.x.data(), token * n + i);
  const std::size_t blocks = shape.token_row().scales();
  if (blocks == 0) {
    for (float& value : row) value = rounded(shape.wire, value);
    return row;
  }
  std::vector<float> scales(blocks);
  if (shape.input == DType::f8_e4m3) {
    std::copy_n(&from.scales[token * blocks], blocks, scales.begin());
  } else {
    Bytes payload(n);
    moe::quantise(payload.data(), scales.data(), shape.scale_block,
                  from.x.data() + token * n * moe::size_of(shape.input), shape.input, n);
    for (std::size_t i = 0; i < n; ++i) row[i] = load(shape.wire, payload.data(), i);
  }
  for (std::size_t i = 0; i < n; ++i) row[i] *= scales[i / shape.scale_block];
  return row;
}

std::vector<moe::RouteEntry> StepOf::entries(std::uint32_t source, std::size_t token,
                                             std::uint32_t to) const {
  std::vector<moe::RouteEntry> entries;
  for (std::size_t k = token * shape.top_k; k < (token + 1) * shape.top_k; ++k) {
    const std::int64_t id = given[source].ids[k];
    if (id < 0) continue;
    const std::int64_t physical = tables[source][static_cast<std::size_t>(id)];
    if (physical < 0 || physical >> 32 != to) continue;
    const auto expert = static_cast<std::uint32_t>(physical);
    const auto same = std::ranges::find(entries, expert, &moe::RouteEntry::expert);
    if (same == entries.end()) {
      entries.push_back({expert, given[source].weights[k]});
    } else {
      same->weight += given[source].weights[k];
    }
  }
  return entries;
}

float StepOf::expert(std::uint32_t rank, std::uint32_t local, float x) const {
  return rounded(shape.combine, x * static_cast<float>(1 + (rank * 7 + local) % 5));
}

std::vector<float> StepOf::combined(std::uint32_t source, std::size_t token,
                                    const std::vector<bool>& missing) const {
  const std::vector<float> x = placed(source, token);
  std::vector<float> sum(x.size());
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    const auto local = entries(source, token, rank);
    if (local.empty() || missing[rank]) continue;
    for (std::size_t i = 0; i < x.size(); ++i) {
      float row = 0;
      for (const auto& [which, weight] : local) {
        row = std::fma(weight, expert(rank, which, x[i]), row);
      }
      sum[i] += rounded(shape.combine, row);
    }
  }
  for (float& value : sum) value = rounded(shape.output, value);
  return sum;
}

// --- a step of one rank ----------------------------------------------------------------------

namespace {

// Places for rows, with a gap after each group: where each group begins, and all rows.
struct Room {
  std::vector<std::int64_t> begins;
  std::size_t rows = 0;
};

Room room_for(const std::vector<std::int64_t>& group_rows) {
  Room room;
  for (const std::int64_t rows : group_rows) {
    room.begins.push_back(static_cast<std::int64_t>(room.rows));
    room.rows += static_cast<std::size_t>(rows) + 1;
  }
  return room;
}

bool equal(const std::vector<float>& a, const std::vector<float>& b) {
  // Compares values: a sum that begins with zero is never a negative zero.
  return std::ranges::equal(a, b);
}

}  // namespace

Bytes place_and_compute(const StepOf& step, Member& member, std::uint32_t slot, Order order,
                        std::byte* into) {
  const moe::Shape& shape = step.shape;
  const std::uint32_t rank = member.shape.rank;
  const bool by_expert = order == Order::by_expert;
  const moe::Arrival before = *good(member.exchange->arrival(slot));
  const Room room = room_for(by_expert ? before.expert_rows : before.source_rows);
  const moe::RowFormat format = shape.token_row();
  Bytes x(room.rows * format.payload_bytes());
  std::vector<float> scales(room.rows * format.scales());
  std::vector<std::int32_t> ids(room.rows * shape.top_k);
  std::vector<float> weights(room.rows * shape.top_k);
  good(member.exchange->place(slot, order, room.begins, into ? into : x.data(), scales.data(),
                              ids.data(), weights.data()));
  if (into) std::memcpy(x.data(), into, x.size());
  const moe::Arrival arrival = *good(member.exchange->arrival(slot));
  CHECK(arrival.source_rows == before.source_rows);
  Bytes y(room.rows * shape.combine_row().payload_bytes());
  std::vector<std::int64_t> next = room.begins;
  const auto row_at = [&](std::size_t row) {
    std::vector<float> values(shape.hidden);
    for (std::size_t i = 0; i < shape.hidden; ++i) {
      values[i] = load(shape.wire, x.data(), row * shape.hidden + i);
      if (format.scales() > 0) values[i] *= scales[row * format.scales() + i / shape.scale_block];
    }
    return values;
  };
  for (std::uint32_t source = 0; source < shape.ranks; ++source) {
    std::int64_t rows = 0;
    // Rows of a missing source that were placed are zero.
    const bool missing = arrival.missing[source];
    if (missing && arrival.source_rows[source] == 0) continue;
    for (std::size_t token = 0; token < step.given[source].count; ++token) {
      const auto entries = step.entries(source, token, rank);
      if (entries.empty()) continue;
      ++rows;
      const std::vector<float> expected =
          missing ? std::vector<float>(shape.hidden) : step.placed(source, token);
      if (by_expert) {
        for (const auto& [local, weight] : entries) {
          const auto row = static_cast<std::size_t>(next[local]++);
          CHECK(equal(row_at(row), expected));
          for (std::size_t i = 0; i < shape.hidden; ++i) {
            store(shape.combine, y.data(), row * shape.hidden + i,
                  step.expert(rank, local, expected[i]));
          }
        }
        continue;
      }
      const auto row = static_cast<std::size_t>(next[source]++);
      CHECK(equal(row_at(row), expected));
      for (std::size_t k = 0; k < shape.top_k; ++k) {
        CHECK(ids[row * shape.top_k + k] ==
              (k < entries.size() ? static_cast<std::int32_t>(entries[k].expert) : -1));
        CHECK(weights[row * shape.top_k + k] == (k < entries.size() ? entries[k].weight : 0.0F));
      }
      for (std::size_t i = 0; i < shape.hidden; ++i) {
        float sum = 0;
        for (const auto& [local, weight] : entries) {
          sum = std::fma(weight, step.expert(rank, local, expected[i]), sum);
        }
        store(shape.combine, y.data(), row * shape.hidden + i, sum);
      }
    }
    CHECK(arrival.source_rows[source] == rows);
  }
  return y;
}

std::vector<bool> combine_and_check(const StepOf& step, Member& member, std::uint32_t slot) {
  const moe::Shape& shape = step.shape;
  const std::uint32_t rank = member.shape.rank;
  const std::size_t count = step.given[rank].count;
  Bytes out(count * shape.hidden * moe::size_of(shape.output) + 1);
  const std::vector<bool> missing = good(member.exchange->combine(slot, out.data()));
  for (std::size_t token = 0; token < count; ++token) {
    const std::vector<float> expected = step.combined(rank, token, missing);
    std::vector<float> got(shape.hidden);
    for (std::size_t i = 0; i < shape.hidden; ++i) {
      got[i] = load(shape.output, out.data(), token * shape.hidden + i);
    }
    CHECK(equal(got, expected));
  }
  return missing;
}

std::vector<bool> whole_step(const StepOf& step, Member& member, std::uint32_t slot, Order order) {
  good(member.exchange->dispatch_send(slot, step.given[member.shape.rank].tokens()));
  member.await_dispatch(slot);
  const Bytes y = place_and_compute(step, member, slot, order);
  good(member.exchange->combine_send(slot, y.data()));
  member.await_combine(slot);
  return combine_and_check(step, member, slot);
}

}  // namespace kvxfer::test
