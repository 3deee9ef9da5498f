// The state of one step at this rank, and computations on its rows.
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

// The argument of dispatch_send(). Rows are contiguous.
struct Tokens {
  const void* x = nullptr;          // [count, hidden] of the input dtype
  const float* x_scales = nullptr;  // [count, scales of a row]; for an f8_e4m3 input with scales
  std::size_t count = 0;
  // [count, top_k]. A choice of -1, or of an expert without a live replica, goes nowhere.
  const std::int64_t* ids = nullptr;
  const float* weights = nullptr;  // [count, top_k]
};

// The rows of a step that have arrived.
struct Arrival {
  std::vector<std::int64_t> expert_rows;  // by local expert
  std::vector<std::int64_t> source_rows;  // by rank
  std::vector<bool> missing;              // by rank: lost, and its rows are zero or absent
};

enum class Order : std::uint8_t {
  by_expert,  // one row for each token and local expert
  by_source,  // one row for each token
};

// by_source: one source behind the other. by_expert: each expert's rows begin at a multiple of
// `align` or, if it is set, `capacity` rows apart.
struct Packing {
  Order order = Order::by_expert;
  std::int64_t align = 1;
  std::optional<std::int64_t> capacity;
};

// The begins of each expert's or source's rows, and the number of rows, gaps included.
struct Places {
  std::vector<std::int64_t> begins;
  std::int64_t rows = 0;
};

class EngineWay;
class LocalWay;

// A rank, this one too, from its addition until it is removed.
struct Counterpart {
  std::uint32_t rank = 0;
  PeerId peer = 0;  // unset for this rank
  std::unique_ptr<Way> way;
  // The way, by its kind; both null for this rank.
  LocalWay* neighbour = nullptr;  // on this host
  EngineWay* remote = nullptr;
  bool ready = false;  // both sides have what they need
  Error lost;          // Errc::ok: it is not lost
  bool up() const { return lost.code == Errc::ok; }
};

// The part of one rank in a step.
struct Part {
  std::shared_ptr<Counterpart> pair;  // null: not in the step's view
  Routes sent;                        // to it
  std::optional<std::uint32_t> via;   // its rows went to this rank of its host
  Routes received;                    // from it; empty until they are here
  std::shared_ptr<Counterpart> at;    // the neighbour that has the received rows
  std::vector<std::int64_t> places;   // places of received rows
  // States of the dispatch, then of the combine: no longer awaited (settled), arrived (the others).
  bool settled = false;
  bool routed = false;
  bool dispatched = false;
  bool combined = false;
};

// A step; a slot has one at a time.
struct Step {
  enum class Phase : std::uint8_t {
    idle,
    sent,      // dispatch_send
    arrived,   // dispatch_wait returned done
    placed,    // place
    returned,  // combine_send
    combined,  // combine_wait returned done
    left_out,  // leave_out, not returned by dispatch_wait yet
  };
  bool under_way() const { return phase != Phase::idle && phase != Phase::left_out; }
  Phase phase = Phase::idle;
  std::uint64_t number = 0;
  std::uint64_t key = 0;
  std::size_t tokens = 0;
  std::vector<std::int64_t> ids;  // choices, to route them again
  std::vector<float> weights;
  std::vector<Part> parts;  // by rank
  Arrival arrival;
  Order order = Order::by_expert;
};

// Writes rows of the wire's format, by token, into `to`.
void pack(const Shape& shape, const Tokens& tokens, std::byte* to);

// Returns the arrivals of parts that are settled.
Arrival arrival_of(const Shape& shape, const std::vector<Part>& parts);

// Returns the places of the rows. Fails if an expert has more rows than `capacity`.
Result<Places> places_of(const Arrival& arrival, const Packing& packing);

// Gives each row its place: one for each entry of the routes by_expert, one for each row by_source.
// `next`: the next place by local expert, or of this source; it moves on.
void assign_places(const Routes& routes, Order order, std::span<std::int64_t> next,
                   std::vector<std::int64_t>& places);

// The memory in which rows are placed.
struct Room {
  std::byte* x;
  float* scales;
  std::int32_t* ids;
  float* weights;
};

// Places the rows of one source from its token rows; null: zeros.
void place_rows(const Shape& shape, const Routes& routes, Order order,
                std::span<const std::int64_t> places, const std::byte* tokens, const Room& to,
                Stores stores);

// Writes the combine rows for one source, from rows y at the places of those of x.
void combine_rows(const Shape& shape, const Routes& routes, Order order,
                  std::span<const std::int64_t> places, const std::byte* y, std::byte* to);

// The rows of one rank for tokens of this one.
struct Contribution {
  const Routes* routes;
  const std::byte* rows;
};
// Writes the sums to out [tokens, hidden] of the output dtype.
void sum_rows(const Shape& shape, std::size_t tokens, std::span<const Contribution> contributions,
              std::byte* out);

}  // namespace kvxfer::moe
