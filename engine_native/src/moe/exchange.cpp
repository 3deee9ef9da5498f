// Pairs, views and completions. exchange_step.cpp has waiting and the calls of a step.
#include "moe/exchange.hpp"

#include <algorithm>
#include <numeric>

#include "moe/engine_way.hpp"
#include "moe/local_way.hpp"

namespace kvxfer::moe {

Result<std::unique_ptr<Exchange>> Exchange::create(TransferEngine& engine, Shape shape,
                                                   Options options) {
  if (auto good = check(shape); !good) return good.error();
  auto own = OwnMemory::create(shape);
  if (!own) return own.error();
  return std::unique_ptr<Exchange>(
      new Exchange(engine, std::move(shape), options, std::move(*own)));
}

Exchange::Exchange(TransferEngine& engine, Shape shape, Options options, OwnMemory own)
    : engine_(engine),
      shape_(std::move(shape)),
      options_(options),
      own_(std::move(own)),
      pairs_(shape_.ranks),
      hosts_(shape_.ranks),
      why_lost_(shape_.ranks),
      steps_(shape_.slots),
      inputs_(shape_.slots),
      sending_(shape_.slots) {
  std::iota(hosts_.begin(), hosts_.end(), 0U);
  for (std::uint32_t i = 1; i <= shape_.ranks; ++i) {
    others_first_.push_back((shape_.rank + i) % shape_.ranks);
  }
  pairs_[shape_.rank] = std::make_shared<Counterpart>(Counterpart{
      .rank = shape_.rank, .way = LocalWay::to_self(shape_, own_.at(0)), .ready = true});
}

Exchange::~Exchange() {
  // No operation reads own memory after this, even if it fails because the engine is closed.
  if (own_region_) [[maybe_unused]]
    const auto given_back = engine_.deregister(own_region_);
}

// --- pairs -----------------------------------------------------------------------------------

int Exchange::memory_fd() const { return own_.memory_fd(); }
std::size_t Exchange::memory_bytes() const { return own_.layout().bytes(); }
int Exchange::doorbell_fd() const { return own_.doorbell_fd(); }

Result<void> Exchange::check_new(std::uint32_t rank, PeerId peer) const {
  if (rank >= shape_.ranks || rank == shape_.rank) {
    return invalid_argument("rank " + std::to_string(rank) + " is no other rank of this group of " +
                            std::to_string(shape_.ranks));
  }
  if (const auto known = of_peer(peer); known && known->rank != rank) {
    return invalid_argument("peer " + std::to_string(peer) + " is rank " +
                            std::to_string(known->rank) + " already, not " + std::to_string(rank));
  }
  return {};
}

Result<void> Exchange::add_local(std::uint32_t rank, PeerId peer, UniqueFd memory,
                                 std::size_t bytes, UniqueFd doorbell) {
  const OneAtATime::Call call(in_use_, "Exchange");
  if (auto good = check_new(rank, peer); !good) return good;
  if (pairs_[rank]) {
    return invalid_argument("rank " + std::to_string(rank) + " has been added; remove it first");
  }
  auto way = LocalWay::map(shape_, rank, memory, bytes, std::move(doorbell));
  if (!way) return way.error();
  LocalWay* const neighbour = way->get();
  pairs_[rank] = std::make_shared<Counterpart>(Counterpart{
      .rank = rank, .peer = peer, .way = std::move(*way), .neighbour = neighbour, .ready = true});
  return {};
}

Result<EngineWay*> Exchange::remote(std::uint32_t rank, PeerId peer) {
  if (auto good = check_new(rank, peer); !good) return good.error();
  if (const auto& pair = pairs_[rank]) {
    if (pair->remote && pair->peer == peer) return pair->remote;
    return invalid_argument("rank " + std::to_string(rank) + " has been added; remove it first");
  }
  if (!own_region_) {
    auto region = engine_.register_memory(own_.at(0), own_.own_bytes().size());
    if (!region) return region.error();
    own_region_ = std::move(*region);
  }
  auto way = EngineWay::open(engine_, shape_, rank, peer, own_, options_.timeout);
  if (!way) return way.error();
  EngineWay* const remote = way->get();
  pairs_[rank] = std::make_shared<Counterpart>(
      Counterpart{.rank = rank, .peer = peer, .way = std::move(*way), .remote = remote});
  return remote;
}

Result<std::string> Exchange::open_remote(std::uint32_t rank, PeerId peer) {
  const OneAtATime::Call call(in_use_, "Exchange");
  const auto way = remote(rank, peer);
  if (!way) return way.error();
  return (*way)->terms();
}

Result<void> Exchange::add_remote(std::uint32_t rank, PeerId peer, std::string_view terms) {
  const OneAtATime::Call call(in_use_, "Exchange");
  const auto way = remote(rank, peer);
  if (!way) return way.error();
  if (auto good = (*way)->accept(terms, own_region_); !good) return good;
  pairs_[rank]->ready = true;
  return {};
}

void Exchange::remove(std::uint32_t rank) {
  const OneAtATime::Call call(in_use_, "Exchange");
  if (rank >= shape_.ranks || rank == shape_.rank || !pairs_[rank]) return;
  drain();  // steps that wait for it look once more at what arrived
  lose(*pairs_[rank], {Errc::peer_lost, "it was removed"});
  pairs_[rank].reset();  // steps that have rows of it keep it until they end
}

std::vector<std::pair<std::string, std::uint64_t>> Exchange::memory_parts() const {
  auto parts = own_.layout().parts();
  const auto inboxes = static_cast<std::uint64_t>(
      std::ranges::count_if(pairs_, [](const auto& pair) { return pair && pair->remote; }));
  if (inboxes == 0) return parts;
  for (auto& [name, bytes] : InboxLayout(shape_).parts()) {
    parts.emplace_back("inboxes: " + name, bytes * inboxes);
  }
  return parts;
}

std::shared_ptr<Counterpart> Exchange::of_peer(PeerId peer) const {
  for (const auto& pair : pairs_) {
    if (pair && pair->peer == peer && pair->rank != shape_.rank) return pair;
  }
  return nullptr;
}

void Exchange::lose(Counterpart& pair, Error why) {
  if (!pair.up()) return;
  pair.lost = std::move(why);
  why_lost_[pair.rank] = pair.lost;
  reroute_ = true;
}

// --- views -----------------------------------------------------------------------------------

Result<void> Exchange::check_view(const View& view, std::uint64_t first_step) const {
  if (view.number > kMaxView || (view_ && view.number <= view_->number)) {
    return invalid_argument("view " + std::to_string(view.number) +
                            " does not follow the one before");
  }
  if (first_step > kMaxStep || (view_ && first_step > next_step_)) {
    return invalid_argument("the view begins at step " + std::to_string(first_step) +
                            ", and the next step here is " + std::to_string(next_step_));
  }
  if (view.alive.size() != shape_.ranks || view.table.size() != shape_.experts ||
      !view.alive[shape_.rank]) {
    return invalid_argument("a view has all " + std::to_string(shape_.ranks) + " ranks and all " +
                            std::to_string(shape_.experts) + " experts, and this rank alive");
  }
  for (std::uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    if (view.alive[rank] && !(pairs_[rank] && pairs_[rank]->ready)) {
      return invalid_argument("the view has rank " + std::to_string(rank) +
                              ", which has not been added here");
    }
  }
  for (std::size_t expert = 0; expert < view.table.size(); ++expert) {
    const std::int64_t physical = view.table[expert];
    if (physical == -1) continue;
    const auto rank = static_cast<std::uint64_t>(physical) >> 32;
    const auto local = static_cast<std::uint32_t>(physical);
    if (rank >= shape_.ranks || !view.alive[rank] || local >= shape_.local_experts[rank]) {
      return invalid_argument("the table has expert " + std::to_string(expert) + " at expert " +
                              std::to_string(local) + " of rank " + std::to_string(rank) +
                              ", which the view or that rank does not have");
    }
  }
  for (const Step& step : steps_) {
    if (step.under_way() && step.phase > Step::Phase::sent && step.number >= first_step) {
      return invalid_argument("step " + std::to_string(step.number) +
                              " has been dispatched by all; a view cannot begin at step " +
                              std::to_string(first_step));
    }
  }
  return {};
}

Result<void> Exchange::set_view(const View& view, std::uint64_t first_step) {
  const OneAtATime::Call call(in_use_, "Exchange");
  if (auto good = check_view(view, first_step); !good) return good;
  if (!view_) next_step_ = first_step;
  view_ = view;
  std::vector<std::uint32_t> again;
  for (std::uint32_t slot = 0; slot < shape_.slots; ++slot) {
    const Step& step = steps_[slot];
    if (step.phase == Step::Phase::sent && step.number >= first_step) again.push_back(slot);
  }
  std::ranges::sort(again, {}, [this](std::uint32_t slot) { return steps_[slot].number; });
  for (const std::uint32_t slot : again) {
    if (auto good = await_sent(slot, Direction::dispatch); !good) return good;
    const Step& step = steps_[slot];
    // The table is good, and so were the choices.
    if (auto good = route(shape_, view_->table, step.ids, step.weights, routes_); !good)
      return good;
    send(slot, nullptr);
  }
  return {};
}

Result<void> Exchange::set_hosts(std::vector<std::uint32_t> hosts) {
  const OneAtATime::Call call(in_use_, "Exchange");
  if (hosts.size() != shape_.ranks) {
    return invalid_argument("hosts of all " + std::to_string(shape_.ranks) +
                            " ranks are needed, not of " + std::to_string(hosts.size()));
  }
  hosts_ = std::move(hosts);
  return {};
}

std::vector<std::uint32_t> Exchange::lost() const {
  std::vector<std::uint32_t> lost;
  for (std::uint32_t rank = 0; view_ && rank < shape_.ranks; ++rank) {
    if (view_->alive[rank] && !(pairs_[rank] && pairs_[rank]->up())) lost.push_back(rank);
  }
  return lost;
}

Error Exchange::why_lost(std::uint32_t rank) const {
  return rank < shape_.ranks ? why_lost_[rank] : Error{};
}

// --- completions -----------------------------------------------------------------------------

void Exchange::drain() {
  using Kind = Completion::Kind;
  for (Completion& completion : engine_.drain()) {
    if (completion.code == Errc::engine_closed) closed_ = true;
    const auto pair = of_peer(completion.peer);
    switch (completion.kind) {
      case Kind::write: {
        const auto found = posted_.find(completion.id);
        if (found == posted_.end()) break;
        --sending_[found->second.slot][static_cast<std::size_t>(found->second.direction)];
        posted_.erase(found);
        if (completion.code != Errc::ok && pair) {
          lose(*pair, {completion.code, "a write to it failed: " + completion.text});
        }
        break;
      }
      case Kind::arrival:
      case Kind::counter: {
        const auto imm = static_cast<Imm>(completion.id);
        for (const auto& each : pairs_) {
          if (each && each->remote && each->remote->arrived(imm)) break;
        }
        break;
      }
      case Kind::peer_down:
        if (pair) lose(*pair, {completion.code, completion.text});
        events_.push_back(std::move(completion));
        break;
      default:
        events_.push_back(std::move(completion));
        break;
    }
  }
}

std::vector<Completion> Exchange::events() {
  const OneAtATime::Call call(in_use_, "Exchange");
  drain();
  return std::exchange(events_, {});
}

bool Exchange::quiet() {
  const OneAtATime::Call call(in_use_, "Exchange");
  drain();
  return events_.empty() && lost().empty();
}

}  // namespace kvxfer::moe
