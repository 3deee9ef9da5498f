// From page lists to writes on the wire: checks every page and joins neighbours. Pure functions.
#pragma once

#include <vector>

#include "kvxfer/types.hpp"
#include "operation.hpp"

namespace kvxfer {

// Pages that follow each other on both sides become one write; writes longer than kMaxWriteBytes
// are split. Fails with out-of-bounds or invalid-argument, naming the first bad page.
// `writes`: an empty list, whose memory is used.
Result<std::vector<WireWrite>> plan_pages(const PagedWrite& pages, std::uint64_t source_size,
                                          std::uint64_t destination_size,
                                          std::vector<WireWrite> writes = {});

// `shards`: into how many writes of equal length it is split at least, if it is long enough for
// that to pay.
Result<std::vector<WireWrite>> plan_single(const SingleWrite& write, std::uint64_t source_size,
                                           std::uint64_t destination_size, unsigned shards = 1);

// Makes groups of them, and returns how many.
std::uint64_t form_groups(std::span<WireWrite> writes);

// The writes of a list that share both regions.
struct ListedPart {
  const ListedWrite* first = nullptr;  // of them
  std::vector<WireWrite> writes;
  std::uint64_t bytes = 0;
};
Result<std::vector<ListedPart>> plan_list(std::span<const ListedWrite> writes, unsigned shards);

}  // namespace kvxfer
