// Waiting, and the calls of a step in their order.
#include <algorithm>
#include <functional>
#include <thread>

#include "clock.hpp"
#include "moe/engine_way.hpp"
#include "moe/exchange.hpp"
#include "moe/local_way.hpp"

namespace kvxfer::moe {
namespace {

using Phase = Step::Phase;

const char* next_call(Phase phase) {
  switch (phase) {
    case Phase::idle:
      return "it holds no step; dispatch_send() begins one";
    case Phase::sent:
    case Phase::arrived:
    case Phase::left_out:
      return "dispatch_recv() comes next";
    case Phase::placed:
      return "combine_send() comes next";
    case Phase::returned:
    case Phase::combined:
      break;
  }
  return "combine_recv() comes next";
}

std::uint64_t after(Duration timeout) {
  constexpr Duration kLong = std::chrono::hours(24 * 365);
  return now_ns() + static_cast<std::uint64_t>(std::clamp(timeout, Duration{}, kLong).count());
}

int milliseconds(std::uint64_t ns) {
  return static_cast<int>(std::min<std::uint64_t>(ns / 1'000'000 + 1, INT32_MAX));
}

}  // namespace

Result<void> Exchange::require_phase(std::uint32_t slot, const char* call, Phase phase,
                                     Phase other) const {
  if (slot >= shape_.slots) {
    return invalid_argument("slot " + std::to_string(slot) + " of " + std::to_string(shape_.slots));
  }
  const Phase now = steps_[slot].phase;
  if (now == phase || now == other) return {};
  return invalid_argument(std::string(call) + " in slot " + std::to_string(slot) + ": " +
                          next_call(now));
}

Result<Step*> Exchange::step_in(std::uint32_t slot, const char* call, Phase phase, Phase other) {
  if (auto good = require_phase(slot, call, phase, other); !good) return good.error();
  return &steps_[slot];
}

Result<void> Exchange::check_free(std::uint32_t slot) const {
  return require_phase(slot, "dispatch_send()", Phase::idle, Phase::idle);
}

Result<void> Exchange::check_placed(std::uint32_t slot) const {
  return require_phase(slot, "combine_send()", Phase::placed, Phase::placed);
}

// --- waiting ---------------------------------------------------------------------------------

template <class Ready>
Result<Waited> Exchange::wait(Duration timeout, bool for_events, const Ready& ready) {
  const std::uint64_t deadline = after(timeout);
  std::uint64_t spins_until = after(options_.spin);
  while (true) {
    drain();
    reroute();
    look_for_neighbours();
    if (closed_) return Error{Errc::engine_closed, "the engine of this rank was closed"};
    if (ready()) return Waited::done;
    if (for_events && !events_.empty()) return Waited::events;
    const std::uint64_t now = now_ns();
    if (now >= deadline) return Waited::deadline;
    if (now < spins_until) {
      std::this_thread::yield();
      continue;
    }
    own_.sleep(engine_.event_fd(), milliseconds(deadline - now), ready);
    spins_until = after(options_.spin);
  }
}

Result<void> Exchange::await_sent(std::uint32_t slot, Direction direction) {
  const std::size_t& sending = sending_[slot][static_cast<std::size_t>(direction)];
  // Each operation ends by its own deadline, or its peer is lost.
  const auto waited = wait(2 * options_.timeout, false, [&] { return sending == 0; });
  if (!waited) return waited.error();
  if (*waited == Waited::done) return {};
  return Error{Errc::deadline_exceeded,
               "writes of the step before in slot " + std::to_string(slot) + " have not ended"};
}

// --- dispatch --------------------------------------------------------------------------------

Result<std::byte*> Exchange::input(std::uint32_t slot) {
  if (slot >= shape_.slots) {
    return invalid_argument("slot " + std::to_string(slot) + " of " + std::to_string(shape_.slots));
  }
  const RowFormat row = shape_.token_row();
  const std::size_t bytes = shape_.hidden * size_of(shape_.input);
  if (shape_.input == shape_.wire && bytes == row.bytes()) {
    return own_.at(own_.layout().tokens(slot));
  }
  if (inputs_[slot].empty()) inputs_[slot].resize(shape_.max_tokens * bytes);
  return inputs_[slot].data();
}

Result<void> Exchange::check_tokens(const Tokens& tokens) const {
  if (tokens.count > shape_.max_tokens) {
    return invalid_argument(std::to_string(tokens.count) + " tokens; max_tokens is " +
                            std::to_string(shape_.max_tokens));
  }
  if (tokens.count == 0) return {};
  if (!tokens.x || !tokens.ids || !tokens.weights) {
    return invalid_argument("x, ids and weights are needed for tokens");
  }
  const bool has_scales = shape_.input == DType::f8_e4m3 && shape_.scale_block > 0;
  if (has_scales == (tokens.x_scales != nullptr)) return {};
  return invalid_argument(has_scales ? "an f8_e4m3 input needs its scales"
                                     : "scales go with an f8_e4m3 input and a scale_block only");
}

Result<std::uint64_t> Exchange::dispatch_send(std::uint32_t slot, const Tokens& tokens) {
  const OneAtATime::Call call(in_use_, "Exchange");
  if (auto good = check_free(slot); !good) return good.error();
  if (!view_) return invalid_argument("dispatch_send before set_view");
  if (auto good = check_tokens(tokens); !good) return good.error();
  if (auto good = await_sent(slot, Direction::dispatch); !good) return good.error();
  Step& step = steps_[slot];
  const std::size_t choices = tokens.count * shape_.top_k;
  step.number = next_step_;
  step.tokens = tokens.count;
  step.ids.assign(tokens.ids, tokens.ids + choices);
  step.weights.assign(tokens.weights, tokens.weights + choices);
  if (auto good = route(shape_, view_->table, step.ids, step.weights, routes_); !good) {
    return good.error();
  }
  if (left_out_.erase(next_step_) == 1) {
    step.phase = Phase::left_out;
    return next_step_++;
  }
  send(slot, &tokens);
  step.phase = Phase::sent;
  return next_step_++;
}

void Exchange::send(std::uint32_t slot, const Tokens* tokens) {
  Step& step = steps_[slot];
  step.key = key_of(view_->number, step.number);
  step.parts.resize(shape_.ranks);
  const OwnLayout& layout = own_.layout();
  own_.withdraw(layout.routes_word(slot));
  own_.withdraw(layout.rows_word(slot));
  for (std::uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    Part& part = step.parts[rank];
    part.settled = part.routed = part.dispatched = part.combined = false;
    part.via.reset();
    part.received.clear();
    part.at.reset();
    part.pair = view_->alive[rank] ? pairs_[rank] : nullptr;
    std::swap(part.sent, routes_[rank]);
    if (!part.pair) continue;
    if (part.pair->remote) part.pair->remote->look_again(slot);
    const std::size_t message = layout.message(slot, rank);
    own_.head(message) = {.key = step.key,
                          .rows = static_cast<std::uint32_t>(part.sent.rows.size()),
                          .entries = static_cast<std::uint32_t>(part.sent.entries.size())};
    write_routes(part.sent, own_.at(message + sizeof(MessageHead)));
  }
  own_.publish(layout.routes_word(slot), step.key);
  if (tokens) pack(shape_, *tokens, own_.at(layout.tokens(slot)));
  own_.publish(layout.rows_word(slot), step.key);
  choose_ways(step);
  for (const std::uint32_t rank : others_first_) {
    if (!step.parts[rank].via) post_dispatch(slot, step, rank);
  }
}

void Exchange::gather_tokens(const Step& step, std::span<const std::uint32_t> ranks) {
  goes_.assign(step.tokens, false);
  for (const std::uint32_t rank : ranks) {
    for (const RouteRow& row : step.parts[rank].sent.rows) goes_[row.token] = true;
  }
  tokens_.clear();
  for (std::size_t token = 0; token < goes_.size(); ++token) {
    if (goes_[token]) tokens_.push_back(static_cast<std::int64_t>(token));
  }
}

void Exchange::choose_ways(Step& step) {
  for (std::uint32_t first = 0; first < shape_.ranks; ++first) {
    neighbours_.clear();
    std::size_t rows = 0;
    for (std::uint32_t rank = 0; rank < shape_.ranks; ++rank) {
      const Part& part = step.parts[rank];
      if (hosts_[rank] != hosts_[first] || !part.pair || !part.pair->up() || !part.pair->remote) {
        continue;
      }
      neighbours_.push_back(rank);
      rows += part.sent.rows.size();
    }
    // Once for each host.
    if (neighbours_.size() < 2 || neighbours_.front() != first) continue;
    gather_tokens(step, neighbours_);
    if (tokens_.size() == rows) continue;
    const std::uint32_t through = neighbours_[shape_.rank % neighbours_.size()];
    for (const std::uint32_t rank : neighbours_) {
      if (rank != through) step.parts[rank].via = through;
    }
  }
}

void Exchange::post_dispatch(std::uint32_t slot, const Step& step, std::uint32_t rank) {
  const Part& part = step.parts[rank];
  if (!part.pair || !part.pair->up()) return;
  neighbours_.assign(1, rank);
  for (std::uint32_t other = 0; other < shape_.ranks; ++other) {
    if (step.parts[other].via == rank) neighbours_.push_back(other);
  }
  if (part.pair->remote) gather_tokens(step, neighbours_);
  operations_.clear();
  posted(slot, Direction::dispatch, *part.pair,
         part.pair->way->post_dispatch(slot, {tokens_, std::span(neighbours_).subspan(1)},
                                       operations_));
}

void Exchange::post_combine(std::uint32_t slot, const Part& part) {
  if (!part.pair || !part.pair->up()) return;
  operations_.clear();
  posted(slot, Direction::combine, *part.pair,
         part.pair->way->post_combine(slot, static_cast<std::uint32_t>(part.received.rows.size()),
                                      operations_));
}

void Exchange::posted(std::uint32_t slot, Direction direction, Counterpart& pair,
                      const Result<void>& result) {
  for (const OperationId operation : operations_) {
    posted_.emplace(operation, Posted{slot, direction});
  }
  sending_[slot][static_cast<std::size_t>(direction)] += operations_.size();
  if (!result) lose(pair, result.error());
}

void Exchange::reroute() {
  if (!std::exchange(reroute_, false)) return;
  for (std::uint32_t slot = 0; slot < shape_.slots; ++slot) {
    Step& step = steps_[slot];
    if (!step.under_way() || step.phase == Phase::combined) continue;
    for (std::uint32_t rank = 0; rank < shape_.ranks; ++rank) {
      Part& part = step.parts[rank];
      if (!part.via || step.parts[*part.via].pair->up()) continue;
      part.via.reset();
      if (!part.combined) post_dispatch(slot, step, rank);
    }
  }
}

// --- rows for several ranks of a host --------------------------------------------------------

void Exchange::look_for_neighbours() {
  const auto is_neighbour = [](const auto& pair) { return pair && pair->neighbour; };
  if (std::ranges::none_of(pairs_, is_neighbour)) return;
  for (std::uint32_t slot = 0; slot < shape_.slots; ++slot) {
    Step& step = steps_[slot];
    if (step.phase != Phase::sent) continue;
    for (Part& part : step.parts) {
      if (part.pair && part.pair->remote) dispatched(slot, step, part);
    }
  }
}

void Exchange::tell_neighbours(std::uint32_t slot, std::uint64_t key, const Counterpart& from) {
  const OwnLayout& layout = own_.layout();
  const std::size_t word = layout.relay_word(slot, from.rank);
  own_.withdraw(word);
  own_.head(layout.relay_head(slot, from.rank)) = {
      .key = key, .ordinal = from.remote->ordinal(slot), .place = from.remote->inbox_number()};
  own_.publish(word, key);
  for (const auto& pair : pairs_) {
    if (pair && pair->neighbour) pair->neighbour->ring();
  }
}

void Exchange::take_from_neighbours(std::uint32_t slot, const Step& step, Part& part) {
  const std::uint32_t from = part.pair->rank;
  for (const auto& pair : pairs_) {
    if (!pair || !pair->neighbour) continue;
    const Held held = pair->neighbour->read_relayed(from, slot, step.key, part.received);
    if (held == Held::nothing) continue;
    if (held == Held::malformed) {
      return lose(*part.pair, {Errc::protocol_error, "it sent a malformed dispatch to rank " +
                                                         std::to_string(pair->rank)});
    }
    part.at = pair;
    part.routed = part.dispatched = true;
    return;
  }
}

// --- dispatch, at the other end --------------------------------------------------------------

bool Exchange::dispatched(std::uint32_t slot, const Step& step, Part& part) {
  if (!part.pair || part.settled) return true;
  Counterpart& pair = *part.pair;
  Held held = pair.way->dispatched(slot, step.key);
  if ((held == Held::routes || held == Held::whole) && !part.routed) {
    const Held read = pair.way->read_routes(slot, step.key, part.received);
    part.routed = read == Held::routes;
    if (!part.routed) held = read;
  }
  if (held == Held::malformed) {
    lose(pair, {Errc::protocol_error, "it sent a malformed dispatch"});
  }
  part.dispatched = held == Held::whole;
  if (pair.remote && part.dispatched) tell_neighbours(slot, step.key, pair);
  if (pair.remote && !part.dispatched) take_from_neighbours(slot, step, part);
  // Nothing comes from a lost rank after this look.
  part.settled = part.dispatched || !pair.up();
  return part.settled;
}

Result<Waited> Exchange::dispatch_wait(std::uint32_t slot, Duration timeout) {
  const OneAtATime::Call call(in_use_, "Exchange");
  if (slot < shape_.slots && steps_[slot].phase == Phase::left_out) {
    steps_[slot].phase = Phase::idle;
    return Waited::left_out;
  }
  const auto found = step_in(slot, "dispatch_recv()", Phase::sent, Phase::arrived);
  if (!found) return found.error();
  Step& step = **found;
  if (step.phase == Phase::arrived) return Waited::done;
  const auto waited = wait(timeout, true, [&] {
    bool all = true;
    for (Part& part : step.parts) all &= dispatched(slot, step, part);
    return all;
  });
  if (!waited || *waited != Waited::done) return waited;
  step.arrival = arrival_of(shape_, step.parts);
  step.phase = Phase::arrived;
  return waited;
}

Result<std::byte*> Exchange::answers(std::uint32_t slot) {
  if (slot >= shape_.slots) {
    return invalid_argument("slot " + std::to_string(slot) + " of " + std::to_string(shape_.slots));
  }
  const RowFormat row = shape_.combine_row();
  return row.bytes() == row.payload_bytes() ? own_.at(own_.layout().combine(slot, 0)) : nullptr;
}

Result<bool> Exchange::in_answers(std::uint32_t slot, Order order, const void* rows) const {
  const OwnLayout& layout = own_.layout();
  const auto* const first = own_.at(layout.combine(slot, 0));
  const auto* const last = own_.at(layout.combine(slot, shape_.combine_rows()));
  if (!rows || std::less<>()(rows, first) || !std::less<>()(rows, last)) return false;
  const RowFormat row = shape_.combine_row();
  if (rows != first || order == Order::by_expert || row.bytes() != row.payload_bytes()) {
    return invalid_argument(
        "rows in answers() must be of layout tokens, and begin where it begins");
  }
  for (const Part& part : steps_[slot].parts) {
    if (!part.places.empty() &&
        static_cast<std::size_t>(part.places.back()) >= shape_.combine_rows()) {
      return invalid_argument("answers() has " + std::to_string(shape_.combine_rows()) +
                              " rows; begins exceed them");
    }
  }
  return true;
}

Result<const Arrival*> Exchange::arrival(std::uint32_t slot) const {
  if (slot < shape_.slots &&
      (steps_[slot].phase == Phase::arrived || steps_[slot].phase == Phase::placed)) {
    return &steps_[slot].arrival;
  }
  return invalid_argument("nothing has arrived in slot " + std::to_string(slot));
}

Result<void> Exchange::place(std::uint32_t slot, Order order, std::span<const std::int64_t> begins,
                             void* x, float* scales, std::int32_t* ids, float* weights) {
  const OneAtATime::Call call(in_use_, "Exchange");
  const auto found = step_in(slot, "dispatch_recv()", Phase::arrived, Phase::placed);
  if (!found) return found.error();
  Step& step = **found;
  const bool by_expert = order == Order::by_expert;
  const std::size_t groups = by_expert ? shape_.local_experts[shape_.rank] : shape_.ranks;
  if (begins.size() != groups) {
    return invalid_argument("place needs " + std::to_string(groups) + " begins, not " +
                            std::to_string(begins.size()));
  }
  const bool any =
      std::ranges::any_of(step.arrival.source_rows, [](auto rows) { return rows > 0; });
  if (any && (!x || (!scales && shape_.scale_block > 0) || (!by_expert && (!ids || !weights)))) {
    return invalid_argument(
        "place needs room for x, for scales if the wire has them, and by source for "
        "ids and weights");
  }
  const OwnLayout& layout = own_.layout();
  if (auto good = await_sent(slot, Direction::combine); !good) return good;
  for (std::uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    own_.withdraw(layout.combine_word(slot, rank));
  }
  step.order = order;
  std::vector<std::int64_t> next(begins.begin(), begins.end());
  std::size_t placed = 0;
  for (std::uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    Part& part = step.parts[rank];
    assign_places(part.received, order,
                  by_expert ? std::span(next) : std::span(next).subspan(rank, 1), part.places);
    placed += part.places.size();
  }
  const auto in_place = in_answers(slot, order, x);
  if (!in_place) return in_place.error();
  if (*in_place && shape_.token_row().payload_bytes() > shape_.combine_row().payload_bytes()) {
    return invalid_argument("token rows are longer than those of answers()");
  }
  const bool much = placed * shape_.token_row().payload_bytes() >= kStreamFrom;
  const Stores stores = much ? Stores::streamed : Stores::cached;
  const Room to{static_cast<std::byte*>(x), shape_.scale_block > 0 ? scales : nullptr, ids,
                weights};
  for (const std::uint32_t rank : others_first_) {
    Part& part = step.parts[rank];
    if (part.received.rows.empty()) continue;
    if (part.dispatched) {
      const LocalWay* const relay = part.at ? part.at->neighbour : nullptr;
      place_rows(shape_, part.received, order, part.places,
                 relay ? relay->relayed_tokens(rank, slot) : part.pair->way->tokens(slot), to,
                 stores);
      if (relay ? relay->still_relayed(rank, slot, step.key)
                : part.pair->way->still(slot, Direction::dispatch, step.key)) {
        continue;
      }
      lose(*part.pair, {Errc::peer_lost, "it has given this rank up"});
      part.dispatched = false;
      step.arrival.missing[rank] = true;
    }
    place_rows(shape_, part.received, order, part.places, nullptr, to, stores);
  }
  step.phase = Phase::placed;
  return {};
}

// --- combine ---------------------------------------------------------------------------------

Result<void> Exchange::combine_send(std::uint32_t slot, const void* y) {
  const OneAtATime::Call call(in_use_, "Exchange");
  if (auto good = check_placed(slot); !good) return good;
  Step& step = steps_[slot];
  const auto in_place = in_answers(slot, step.order, y);
  if (!in_place) return in_place.error();
  const OwnLayout& layout = own_.layout();
  for (const std::uint32_t rank : others_first_) {
    Part& part = step.parts[rank];
    part.settled = false;
    if (!part.pair || !part.pair->up()) continue;
    const std::size_t rows = part.received.rows.size();
    std::size_t place = std::size_t{rank} * shape_.max_tokens;
    if (*in_place) {
      place = rows > 0 ? static_cast<std::size_t>(part.places.front()) : 0;
    } else {
      combine_rows(shape_, part.received, step.order, part.places, static_cast<const std::byte*>(y),
                   own_.at(layout.combine(slot, place)));
    }
    own_.head(layout.combine_head(slot, rank)) = {
        .key = step.key, .rows = static_cast<std::uint32_t>(rows), .place = place};
    own_.publish(layout.combine_word(slot, rank), step.key);
    post_combine(slot, part);
  }
  step.phase = Phase::returned;
  return {};
}

bool Exchange::combined(std::uint32_t slot, const Step& step, Part& part) {
  if (!part.pair || part.settled) return true;
  Counterpart& pair = *part.pair;
  const Held held =
      pair.way->combined(slot, step.key, static_cast<std::uint32_t>(part.sent.rows.size()));
  if (held == Held::malformed) lose(pair, {Errc::protocol_error, "it sent a malformed combine"});
  part.combined = held == Held::whole;
  part.settled = part.combined || !pair.up();
  return part.settled;
}

Result<Waited> Exchange::combine_wait(std::uint32_t slot, Duration timeout) {
  const OneAtATime::Call call(in_use_, "Exchange");
  const auto found = step_in(slot, "combine_recv()", Phase::returned, Phase::combined);
  if (!found) return found.error();
  Step& step = **found;
  if (step.phase == Phase::combined) return Waited::done;
  const auto waited = wait(timeout, true, [&] {
    bool all = true;
    for (Part& part : step.parts) all &= combined(slot, step, part);
    return all;
  });
  if (waited && *waited == Waited::done) step.phase = Phase::combined;
  return waited;
}

Result<std::vector<bool>> Exchange::combine(std::uint32_t slot, void* out) {
  const OneAtATime::Call call(in_use_, "Exchange");
  const auto found = step_in(slot, "combine_recv()", Phase::combined, Phase::combined);
  if (!found) return found.error();
  Step& step = **found;
  if (!out && step.tokens > 0) return invalid_argument("combine needs room for the tokens");
  std::vector<Contribution> contributions;
  bool steady = false;
  while (!steady) {
    contributions.clear();
    for (const Part& part : step.parts) {
      if (part.combined) contributions.push_back({&part.sent, part.pair->way->combine_rows(slot)});
    }
    sum_rows(shape_, step.tokens, contributions, static_cast<std::byte*>(out));
    steady = true;
    for (Part& part : step.parts) {
      if (!part.combined || part.pair->way->still(slot, Direction::combine, step.key)) continue;
      lose(*part.pair, {Errc::peer_lost, "it has given this rank up"});
      part.combined = steady = false;
    }
  }
  std::vector<bool> missing;
  missing.reserve(step.parts.size());
  for (const Part& part : step.parts) {
    missing.push_back(!part.sent.rows.empty() && !part.combined);
  }
  end(slot, Phase::idle);
  return missing;
}

void Exchange::end(std::uint32_t slot, Phase phase) {
  for (Part& part : steps_[slot].parts) {
    part.pair.reset();
    part.at.reset();
  }
  // The caller may write to input() from now on; others must not take that for this step's rows.
  own_.withdraw(own_.layout().routes_word(slot));
  own_.withdraw(own_.layout().rows_word(slot));
  steps_[slot].phase = phase;
}

// --- steps that no rank runs -----------------------------------------------------------------

Result<void> Exchange::leave_out(std::uint64_t step) {
  const OneAtATime::Call call(in_use_, "Exchange");
  if (step >= next_step_) {
    left_out_.insert(step);
    return {};
  }
  for (std::uint32_t slot = 0; slot < shape_.slots; ++slot) {
    if (steps_[slot].phase != Phase::sent || steps_[slot].number != step) continue;
    end(slot, Phase::left_out);
    return {};
  }
  return invalid_argument("step " + std::to_string(step) +
                          " cannot be left out: this rank does not wait for its tokens");
}

void Exchange::skip_step() {
  const OneAtATime::Call call(in_use_, "Exchange");
  left_out_.erase(next_step_++);
}

std::vector<std::uint32_t> Exchange::awaited(std::uint32_t slot) const {
  std::vector<std::uint32_t> ranks;
  if (slot >= shape_.slots) return ranks;
  const Step& step = steps_[slot];
  if (step.phase != Phase::sent && step.phase != Phase::returned) return ranks;
  for (std::uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    if (step.parts[rank].pair && !step.parts[rank].settled) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace kvxfer::moe
