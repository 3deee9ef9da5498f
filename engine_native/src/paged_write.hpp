// Turns page lists into writes on the wire: checks every page and joins neighbours. Pure functions.
#pragma once

#include <vector>

#include "kvxfer/types.hpp"
#include "operation.hpp"

namespace kvxfer {

// Appends the writes of the pages to `writes`. Pages that follow each other on both sides become
// one write; writes longer than kMaxWriteBytes are split. Fails with out-of-bounds or
// invalid-argument, naming the first bad page.
Result<void> plan_pages(const PagedWrite& pages, std::uint64_t source_size,
                        std::uint64_t destination_size, std::vector<WireWrite>& writes);

// Appends the writes of a single write. `shards`: the least number of writes of equal length into
// which it is split if it is long enough.
Result<void> plan_single(const SingleWrite& write, std::uint64_t source_size,
                         std::uint64_t destination_size, unsigned shards,
                         std::vector<WireWrite>& writes);

// Forms groups of the writes. Returns the number of groups.
std::uint64_t form_groups(std::span<WireWrite> writes);

// The writes of a list that share both regions.
struct ListedPart {
  const ListedWrite* first = nullptr;  // the first write
  std::size_t count = 0;               // on the wire
  std::uint64_t bytes = 0;
};
// Appends the writes of a list, one part after the other. Returns the parts.
Result<std::vector<ListedPart>> plan_list(std::span<const ListedWrite> list, unsigned shards,
                                          std::vector<WireWrite>& writes);

}  // namespace kvxfer
