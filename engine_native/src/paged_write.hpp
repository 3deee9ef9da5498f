// From page lists to writes on the wire: checks every page and joins neighbours. Pure functions.
#pragma once

#include <vector>

#include "kvxfer/types.hpp"
#include "operation.hpp"

namespace kvxfer {

// Pages that follow each other on both sides become one write; writes longer than kMaxWriteBytes
// are split. Fails with out-of-bounds or invalid-argument, naming the first bad page.
// The writes are added to `writes`, as below.
Result<void> plan_pages(const PagedWrite& pages, std::uint64_t source_size,
                        std::uint64_t destination_size, std::vector<WireWrite>& writes);

// `shards`: into how many writes of equal length it is split at least, if it is long enough for
// that to pay.
Result<void> plan_single(const SingleWrite& write, std::uint64_t source_size,
                         std::uint64_t destination_size, unsigned shards,
                         std::vector<WireWrite>& writes);

// Makes groups of them, and returns how many.
std::uint64_t form_groups(std::span<WireWrite> writes);

// The writes of a list that share both regions.
struct ListedPart {
  const ListedWrite* first = nullptr;  // of them
  std::size_t count = 0;               // on the wire
  std::uint64_t bytes = 0;
};
// One part after the other.
Result<std::vector<ListedPart>> plan_list(std::span<const ListedWrite> list, unsigned shards,
                                          std::vector<WireWrite>& writes);

}  // namespace kvxfer
