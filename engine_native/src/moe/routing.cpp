#include "moe/routing.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace kvxfer::moe {
namespace {

Error refuse_choice(const Shape& shape, std::size_t choice, const std::string& why) {
  return {Errc::invalid_argument, "token " + std::to_string(choice / shape.top_k) + ", choice " +
                                      std::to_string(choice % shape.top_k) + ": " + why};
}

// True if tokens rise, no row is empty, and no number is too high.
bool well_formed(const Shape& shape, std::uint32_t at, const Routes& routes) {
  const std::size_t most = shape.entries_per_row(at);
  std::uint64_t next_token = 0;
  for (std::size_t row = 0; row < routes.rows.size(); ++row) {
    const auto [token, first] = routes.rows[row];
    const std::size_t end =
        row + 1 < routes.rows.size() ? routes.rows[row + 1].first_entry : routes.entries.size();
    if (token < next_token || token >= shape.max_tokens || (row == 0 && first != 0) ||
        end > routes.entries.size() || first >= end || end - first > most) {
      return false;
    }
    next_token = std::uint64_t{token} + 1;
  }
  if (routes.rows.empty() && !routes.entries.empty()) return false;
  return std::ranges::all_of(routes.entries, [&](const RouteEntry& entry) {
    return entry.expert < shape.local_experts[at];
  });
}

}  // namespace

Result<void> route(const Shape& shape, std::span<const std::int64_t> table,
                   std::span<const std::int64_t> ids, std::span<const float> weights,
                   std::vector<Routes>& to) {
  to.resize(shape.ranks);
  for (Routes& routes : to) routes.clear();
  for (std::size_t choice = 0; choice < ids.size(); ++choice) {
    const std::int64_t id = ids[choice];
    if (id == -1) continue;
    if (id < 0 || id >= shape.experts) {
      return refuse_choice(shape, choice,
                           "expert " + std::to_string(id) + "; ids are 0 to " +
                               std::to_string(shape.experts - 1) + ", and -1 for no expert");
    }
    const std::int64_t physical = table[static_cast<std::size_t>(id)];
    if (physical < 0) continue;
    const auto token = static_cast<std::uint32_t>(choice / shape.top_k);
    const auto expert = static_cast<std::uint32_t>(physical);
    Routes& routes = to[static_cast<std::size_t>(physical >> 32)];
    if (routes.rows.empty() || routes.rows.back().token != token) {
      routes.rows.push_back({token, static_cast<std::uint32_t>(routes.entries.size())});
    }
    const auto of_token = std::span(routes.entries).subspan(routes.rows.back().first_entry);
    const auto chosen_before = std::ranges::find(of_token, expert, &RouteEntry::expert);
    if (chosen_before != of_token.end()) {
      chosen_before->weight += weights[choice];
    } else {
      routes.entries.push_back({expert, weights[choice]});
    }
  }
  return {};
}

void write_routes(const Routes& routes, std::byte* to) {
  const std::size_t rows = routes.rows.size() * sizeof(RouteRow);
  if (rows == 0) return;
  std::memcpy(to, routes.rows.data(), rows);
  std::memcpy(to + rows, routes.entries.data(), routes.entries.size() * sizeof(RouteEntry));
}

bool read_routes(const Shape& shape, std::uint32_t at, std::uint32_t rows, std::uint32_t entries,
                 const std::byte* from, Routes& routes) {
  routes.clear();
  if (rows > shape.max_tokens ||
      entries > std::uint64_t{shape.max_tokens} * shape.entries_per_row(at)) {
    return false;
  }
  routes.rows.resize(rows);
  routes.entries.resize(entries);
  if (rows > 0) std::memcpy(routes.rows.data(), from, rows * sizeof(RouteRow));
  if (entries > 0) {
    std::memcpy(routes.entries.data(), from + rows * sizeof(RouteRow),
                entries * sizeof(RouteEntry));
  }
  if (well_formed(shape, at, routes)) return true;
  routes.clear();
  return false;
}

}  // namespace kvxfer::moe
