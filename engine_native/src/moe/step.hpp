// What this rank has of one step, and what is computed of its rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvxfer/types.hpp"
#include "moe/kernels.hpp"
#include "moe/routing.hpp"
#include "moe/shape.hpp"
#include "moe/way.hpp"

namespace kvxfer::moe {

// What dispatch_send() takes. Rows are contiguous.
struct Tokens {
  const void* x = nullptr;          // [count, hidden] of the input dtype
  const float* x_scales = nullptr;  // [count, scales of a row]; for an f8_e4m3 input with scales
  std::size_t count = 0;
  // [count, top_k]. -1, and an expert without a live replica: that choice goes nowhere.
  const std::int64_t* ids = nullptr;
  const float* weights = nullptr;  // [count, top_k]
};

// What has arrived of a step.
struct Arrival {
  std::vector<std::int64_t> expert_rows;  // by local expert
  std::vector<std::int64_t> source_rows;  // by rank
  std::vector<bool> missing;              // by rank: lost, and its rows are zero or not there
};

enum class Order : std::uint8_t {
  by_expert,  // one row for each token and local expert
  by_source,  // one row for each token
};

// by_source: one source behind the other. by_expert: each expert's rows begin at a multiple of
// `align`, or, where there is one, `capacity` rows apart.
struct Packing {
  Order order = Order::by_expert;
  std::int64_t align = 1;
  std::optional<std::int64_t> capacity;
};

// Where the rows of each expert or source begin, and how many rows there are with those between.
struct Places {
  std::vector<std::int64_t> begins;
  std::int64_t rows = 0;
};

class EngineWay;
class LocalWay;

// A rank, this one too, from when it was added until it is removed.
struct Counterpart {
  std::uint32_t rank = 0;
  PeerId peer = 0;  // none for this rank
  std::unique_ptr<Way> way;
  // What the way is. Of this rank neither.
  LocalWay* neighbour = nullptr;  // on this host
  EngineWay* remote = nullptr;
  bool ready = false;  // both sides have what they need
  Error lost;          // Errc::ok: it is not
  bool up() const { return lost.code == Errc::ok; }
};

// Of one rank in a step.
struct Part {
  std::shared_ptr<Counterpart> pair;  // null: the step's view does not have it
  Routes sent;                        // to it
  std::optional<std::uint32_t> via;   // what is for it went to this rank of its host
  Routes received;                    // from it; empty until they are here
  std::shared_ptr<Counterpart> at;    // the neighbour that has what was received
  std::vector<std::int64_t> places;   // of what was received
  // Of the dispatch, then of the combine: whether it is waited for, and has come.
  bool settled = false;
  bool routed = false;
  bool dispatched = false;
  bool combined = false;
};

// One at a time in a slot.
struct Step {
  enum class Phase : std::uint8_t {
    idle,
    sent,      // dispatch_send
    arrived,   // dispatch_wait has said done
    placed,    // place
    returned,  // combine_send
    combined,  // combine_wait has said done
    left_out,  // leave_out, and dispatch_wait has not said so
  };
  bool under_way() const { return phase != Phase::idle && phase != Phase::left_out; }
  Phase phase = Phase::idle;
  std::uint64_t number = 0;
  std::uint64_t key = 0;
  std::size_t tokens = 0;
  std::vector<std::int64_t> ids;  // of the choices, to route them again
  std::vector<float> weights;
  std::vector<Part> parts;  // by rank
  Arrival arrival;
  Order order = Order::by_expert;
};

// Rows of the wire's format, by token, into `to`.
void pack(const Shape& shape, const Tokens& tokens, std::byte* to);

// Of parts that are settled.
Arrival arrival_of(const Shape& shape, const std::vector<Part>& parts);

// Fails where an expert has more rows than `capacity`.
Result<Places> places_of(const Arrival& arrival, const Packing& packing);

// Gives each row that is placed its place: for each entry of the routes by_expert, for each row
// by_source. `next`: by local expert, or of this source; it moves on.
void assign_places(const Routes& routes, Order order, std::span<std::int64_t> next,
                   std::vector<std::int64_t>& places);

// Where rows are placed.
struct Room {
  std::byte* x;
  float* scales;
  std::int32_t* ids;
  float* weights;
};

// The rows of one source out of its token rows; null: zeros.
void place_rows(const Shape& shape, const Routes& routes, Order order,
                std::span<const std::int64_t> places, const std::byte* tokens, const Room& to,
                Stores stores);

// The combine rows for one source, out of rows y where those of x were placed.
void combine_rows(const Shape& shape, const Routes& routes, Order order,
                  std::span<const std::int64_t> places, const std::byte* y, std::byte* to);

// The rows of one rank for tokens of this one.
struct Contribution {
  const Routes* routes;
  const std::byte* rows;
};
// out: [tokens, hidden] of the output dtype.
void sum_rows(const Shape& shape, std::size_t tokens, std::span<const Contribution> contributions,
              std::byte* out);

}  // namespace kvxfer::moe
