// Routes: the tokens that go to each rank, and their experts there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvxfer/error.hpp"
#include "moe/shape.hpp"

namespace kvxfer::moe {

struct RouteRow {
  std::uint32_t token;  // number at its source
  std::uint32_t first_entry;
  bool operator==(const RouteRow&) const = default;
};

struct RouteEntry {
  std::uint32_t expert;  // local to the destination
  float weight;
  bool operator==(const RouteEntry&) const = default;
};

// The routes from one rank to one rank: rows by token, the entries of a row in the order of
// choices. An expert that a token chooses several times has one entry, at the first choice, with
// the sum of the weights: a rank computes it once, and no row has more entries than its rank has
// experts.
struct Routes {
  std::vector<RouteRow> rows;
  std::vector<RouteEntry> entries;

  std::span<const RouteEntry> of(std::size_t row) const {
    const std::size_t end = row + 1 < rows.size() ? rows[row + 1].first_entry : entries.size();
    return std::span(entries).subspan(rows[row].first_entry, end - rows[row].first_entry);
  }
  void clear() {
    rows.clear();
    entries.clear();
  }
};

// Makes the routes of these choices [tokens, top_k] to each rank. `table` is a View's.
Result<void> route(const Shape& shape, std::span<const std::int64_t> table,
                   std::span<const std::int64_t> ids, std::span<const float> weights,
                   std::vector<Routes>& to);

// Returns the bytes of `rows` rows, then `entries` entries, as write_routes() puts them.
constexpr std::size_t routes_bytes(std::size_t rows, std::size_t entries) {
  return rows * sizeof(RouteRow) + entries * sizeof(RouteEntry);
}
void write_routes(const Routes& routes, std::byte* to);
// Reads what another rank, which is not trusted, routes to rank `at`. Returns false unless tokens
// rise, no row is empty, and no number is too high.
bool read_routes(const Shape& shape, std::uint32_t at, std::uint32_t rows, std::uint32_t entries,
                 const std::byte* from, Routes& routes);

}  // namespace kvxfer::moe
