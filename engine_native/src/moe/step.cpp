#include "moe/step.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace kvxfer::moe {
namespace {

std::size_t at(std::int64_t row) { return static_cast<std::size_t>(row); }

}  // namespace

void pack(const Shape& shape, const Tokens& tokens, std::byte* to) {
  const RowFormat row = shape.token_row();
  const auto* from = static_cast<const std::byte*>(tokens.x);
  if (from == to || tokens.count == 0) return;
  const std::size_t from_bytes = shape.hidden * size_of(shape.input);
  if (shape.input == shape.wire && row.scales() == 0 && from_bytes == row.bytes()) {
    return copy(to, from, tokens.count * from_bytes);
  }
  const float* scales = tokens.x_scales;
  for (std::size_t token = 0; token < tokens.count;
       ++token, from += from_bytes, to += row.bytes()) {
    auto* const row_scales = reinterpret_cast<float*>(to + row.scales_offset());
    if (shape.input == shape.wire) {
      copy(to, from, from_bytes);
      if (row.scales() > 0) std::memcpy(row_scales, scales, row.scale_bytes());
      scales += row.scales();
    } else if (row.scales() > 0) {
      quantise(to, row_scales, shape.scale_block, from, shape.input, shape.hidden);
    } else {
      convert(to, shape.wire, from, shape.input, shape.hidden);
    }
  }
}

Arrival arrival_of(const Shape& shape, const std::vector<Part>& parts) {
  Arrival arrival;
  arrival.expert_rows.assign(shape.local_experts[shape.rank], 0);
  for (const Part& part : parts) {
    for (const RouteEntry& entry : part.received.entries) ++arrival.expert_rows[entry.expert];
    arrival.source_rows.push_back(static_cast<std::int64_t>(part.received.rows.size()));
    arrival.missing.push_back(part.pair && !part.dispatched);
  }
  return arrival;
}

Result<Places> places_of(const Arrival& arrival, const Packing& packing) {
  const bool by_expert = packing.order == Order::by_expert;
  const auto& groups = by_expert ? arrival.expert_rows : arrival.source_rows;
  Places places;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    const std::int64_t rows = groups[group];
    places.begins.push_back(places.rows);
    if (!by_expert) {
      places.rows += rows;
    } else if (!packing.capacity) {
      places.rows += (rows + packing.align - 1) / packing.align * packing.align;
    } else if (rows <= *packing.capacity) {
      places.rows += *packing.capacity;
    } else {
      return Error{Errc::invalid_argument, "local expert " + std::to_string(group) + " has " +
                                               std::to_string(rows) + " rows, but capacity is " +
                                               std::to_string(*packing.capacity)};
    }
  }
  return places;
}

void assign_places(const Routes& routes, Order order, std::span<std::int64_t> next,
                   std::vector<std::int64_t>& places) {
  places.clear();
  if (order == Order::by_expert) {
    for (const RouteEntry& entry : routes.entries) places.push_back(next[entry.expert]++);
  } else {
    for (std::size_t row = 0; row < routes.rows.size(); ++row) places.push_back(next[0]++);
  }
}

void place_rows(const Shape& shape, const Routes& routes, Order order,
                std::span<const std::int64_t> places, const std::byte* tokens, const Room& to,
                Stores stores) {
  const RowFormat format = shape.token_row();
  const std::size_t payload = format.payload_bytes();
  const auto place = [&](const RouteRow& row, std::size_t position) {
    std::byte* const x = to.x + position * payload;
    float* const scales = to.scales ? to.scales + position * format.scales() : nullptr;
    if (!tokens) {
      std::memset(x, 0, payload);
      if (scales) std::fill_n(scales, format.scales(), 0.0F);
      return;
    }
    const std::byte* const from = tokens + row.token * format.bytes();
    copy(x, from, payload, stores);
    if (scales) std::memcpy(scales, from + format.scales_offset(), format.scale_bytes());
  };
  for (std::size_t i = 0; i < routes.rows.size(); ++i) {
    const auto entries = routes.of(i);
    if (order == Order::by_expert) {
      const std::size_t first = routes.rows[i].first_entry;
      for (std::size_t k = 0; k < entries.size(); ++k) place(routes.rows[i], at(places[first + k]));
      continue;
    }
    const std::size_t position = at(places[i]);
    place(routes.rows[i], position);
    std::int32_t* const ids = to.ids + position * shape.top_k;
    float* const weights = to.weights + position * shape.top_k;
    std::fill_n(ids, shape.top_k, -1);
    std::fill_n(weights, shape.top_k, 0.0F);
    for (std::size_t k = 0; k < entries.size(); ++k) {
      ids[k] = static_cast<std::int32_t>(entries[k].expert);
      weights[k] = entries[k].weight;
    }
  }
}

void combine_rows(const Shape& shape, const Routes& routes, Order order,
                  std::span<const std::int64_t> places, const std::byte* y, std::byte* to) {
  const RowFormat format = shape.combine_row();
  const std::size_t payload = format.payload_bytes();
  std::vector<WeightedRow> rows;
  for (std::size_t i = 0; i < routes.rows.size(); ++i, to += format.bytes()) {
    if (order == Order::by_source) {
      copy(to, y + at(places[i]) * payload, payload);
      continue;
    }
    rows.clear();
    const auto entries = routes.of(i);
    const std::size_t first = routes.rows[i].first_entry;
    for (std::size_t k = 0; k < entries.size(); ++k) {
      rows.push_back({y + at(places[first + k]) * payload, entries[k].weight});
    }
    weighted_sum(to, shape.combine, rows, shape.combine, shape.hidden);
  }
}

void sum_rows(const Shape& shape, std::size_t tokens, std::span<const Contribution> contributions,
              std::byte* out) {
  const std::size_t stride = shape.combine_row().bytes();
  const std::size_t out_bytes = shape.hidden * size_of(shape.output);
  std::vector<std::size_t> next(contributions.size());
  std::vector<WeightedRow> rows;
  for (std::size_t token = 0; token < tokens; ++token, out += out_bytes) {
    rows.clear();
    for (std::size_t i = 0; i < contributions.size(); ++i) {
      const auto& [routes, from] = contributions[i];
      if (next[i] == routes->rows.size() || routes->rows[next[i]].token != token) continue;
      rows.push_back({from + next[i]++ * stride, 1.0F});
    }
    weighted_sum(out, shape.output, rows, shape.combine, shape.hidden);
  }
}

}  // namespace kvxfer::moe
