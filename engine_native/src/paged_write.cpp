#include "paged_write.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <tuple>

#include "memory_region.hpp"

namespace kvxfer {
namespace {

// Returns the length of the parts of a single write.
std::uint64_t shard_length(std::uint64_t length, unsigned shards) {
  constexpr std::uint64_t kSmallestShard = kLongWriteBytes;
  constexpr std::uint64_t kAlignment = 4096;
  if (shards <= 1 || length >= std::uint64_t{kMaxWriteBytes} * shards) return kMaxWriteBytes;
  const std::uint64_t part = (length + shards - 1) / shards;
  const std::uint64_t aligned = (part + kAlignment - 1) / kAlignment * kAlignment;
  return std::clamp<std::uint64_t>(aligned, kSmallestShard, kMaxWriteBytes);
}

// One side of a paged write. A negative page becomes a very large one.
class PageSide {
 public:
  PageSide(const char* name, std::span<const std::int64_t> pages, std::uint64_t region,
           std::uint64_t offset, std::uint64_t stride, std::uint64_t page_length)
      : name_(name), pages_(pages), region_(region), offset_(offset), stride_(stride) {
    if (offset <= region && page_length <= region - offset) {
      const std::uint64_t room = region - offset - page_length;
      inside_ = stride == 0 ? kMostPages : std::min(room / stride, kMostPages - 1) + 1;
    }
    if (stride > 0 && page_length % stride == 0) step_ = page_length / stride;
  }

  std::uint64_t page(std::size_t position) const {
    return static_cast<std::uint64_t>(pages_[position]);
  }
  bool inside(std::uint64_t page) const { return page < inside_; }
  // True if a page can begin where another ends; next() is that page.
  bool has_next() const { return step_ > 0; }
  std::uint64_t next(std::uint64_t page) const { return page + step_; }
  std::uint64_t offset(std::uint64_t page) const { return offset_ + page * stride_; }

  Error outside(std::size_t position) const {
    return {Errc::out_of_bounds,
            std::string(name_) + " page " + std::to_string(pages_[position]) + " (position " +
                std::to_string(position) + " of the list) is outside the " + name_ + " region of " +
                std::to_string(region_) + " bytes; " +
                (inside_ == 0 ? "no page of this length and offset fits it"
                              : "valid pages are 0 to " + std::to_string(inside_ - 1))};
  }

 private:
  static constexpr auto kMostPages = std::uint64_t{1} << 63;

  const char* name_;
  std::span<const std::int64_t> pages_;
  std::uint64_t region_;
  std::uint64_t offset_;
  std::uint64_t stride_;
  std::uint64_t inside_ = 0;  // pages 0 to this less 1 end inside the region
  std::uint64_t step_ = 0;
};

// Returns the error of the first of these positions that is bad on any side.
Error first_outside(PageSide source, PageSide destination, std::size_t first, std::size_t end) {
  while (first + 1 < end && source.inside(source.page(first)) &&
         destination.inside(destination.page(first))) {
    ++first;
  }
  return source.inside(source.page(first)) ? destination.outside(first) : source.outside(first);
}

}  // namespace

Result<void> plan_pages(const PagedWrite& pages, std::uint64_t source_size,
                        std::uint64_t destination_size, std::vector<WireWrite>& writes) {
  if (pages.source_pages.size() != pages.destination_pages.size()) {
    return Error{Errc::invalid_argument,
                 "page lists differ in length: " + std::to_string(pages.source_pages.size()) +
                     " source pages, " + std::to_string(pages.destination_pages.size()) +
                     " destination pages; pass one destination page per source page"};
  }
  if (pages.source_pages.empty() || pages.page_length == 0) {
    return Error{Errc::invalid_argument,
                 "nothing to write: " + std::to_string(pages.source_pages.size()) + " pages of " +
                     std::to_string(pages.page_length) + " bytes; both must be at least 1"};
  }
  const PageSide source("source", pages.source_pages, source_size, pages.source_offset,
                        pages.source_stride, pages.page_length);
  const PageSide destination("destination", pages.destination_pages, destination_size,
                             pages.destination_offset, pages.destination_stride, pages.page_length);
  const std::uint64_t page_length = pages.page_length;
  const bool joins = source.has_next() && destination.has_next();
  const std::uint64_t longest =
      joins ? std::max<std::uint64_t>(kMaxWriteBytes / page_length, 1) : 1;
  const std::size_t count = pages.source_pages.size();
  writes.reserve(writes.size() + count);
  // Takes a run of pages at a time, so that its multiplications, checks and stores are done once.
  for (std::size_t i = 0; i < count;) {
    const std::size_t first = i;
    const std::uint64_t first_source = source.page(i);
    const std::uint64_t first_destination = destination.page(i);
    std::uint64_t last_source = first_source;
    std::uint64_t last_destination = first_destination;
    std::uint64_t run = 1;
    for (++i; i < count && run < longest; ++i, ++run) {
      if (source.page(i) != source.next(last_source) ||
          destination.page(i) != destination.next(last_destination)) {
        break;
      }
      last_source = source.next(last_source);
      last_destination = destination.next(last_destination);
    }
    // Pages between two pages inside are inside, too.
    if (!source.inside(first_source) || !source.inside(last_source) ||
        !destination.inside(first_destination) || !destination.inside(last_destination)) {
      return first_outside(source, destination, first, i);
    }
    std::uint64_t from = source.offset(first_source);
    std::uint64_t to = destination.offset(first_destination);
    std::uint64_t left = run * page_length;
    for (; left > kMaxWriteBytes; left -= kMaxWriteBytes) {
      writes.push_back({from, to, kMaxWriteBytes});
      from += kMaxWriteBytes;
      to += kMaxWriteBytes;
    }
    writes.push_back({from, to, static_cast<std::uint32_t>(left)});
  }
  return {};
}

Result<void> plan_single(const SingleWrite& write, std::uint64_t source_size,
                         std::uint64_t destination_size, unsigned shards,
                         std::vector<WireWrite>& writes) {
  if (write.length == 0) {
    return Error{Errc::invalid_argument,
                 "nothing to write: length is 0; use write_imm to send "
                 "an immediate without bytes"};
  }
  const auto inside = [&](std::uint64_t offset, std::uint64_t size) {
    return offset <= size && write.length <= size - offset;
  };
  const auto outside = [&](const char* side, std::uint64_t offset, std::uint64_t size) {
    return Error{Errc::out_of_bounds, std::string(side) + " range of " +
                                          std::to_string(write.length) + " bytes at offset " +
                                          std::to_string(offset) + " leaves the region of " +
                                          std::to_string(size) + " bytes"};
  };
  if (!inside(write.source_offset, source_size)) {
    return outside("source", write.source_offset, source_size);
  }
  if (!inside(write.destination_offset, destination_size)) {
    return outside("destination", write.destination_offset, destination_size);
  }
  if (write.length <= kLongWriteBytes) {
    writes.push_back(
        {write.source_offset, write.destination_offset, static_cast<std::uint32_t>(write.length)});
    return {};
  }
  const std::uint64_t part = shard_length(write.length, shards);
  for (std::uint64_t at = 0; at < write.length; at += part) {
    writes.push_back({write.source_offset + at, write.destination_offset + at,
                      static_cast<std::uint32_t>(std::min(part, write.length - at))});
  }
  return {};
}

std::uint64_t form_groups(std::span<WireWrite> writes) {
  std::uint64_t groups = 0;
  for (std::size_t i = 0; i < writes.size(); ++groups) {
    std::uint64_t bytes = writes[i].length;
    const std::size_t most = std::min(i + kMaxGroupWrites, writes.size());
    if (writes[i].length >= kLongWriteBytes) {
      ++i;
      continue;
    }
    for (++i; i < most; ++i) {
      bytes += writes[i].length;
      if (writes[i].length >= kLongWriteBytes || bytes > kMaxGroupBytes) break;
      writes[i - 1].grouped = 1;
    }
  }
  return groups;
}

Result<std::vector<ListedPart>> plan_list(std::span<const ListedWrite> list, unsigned shards,
                                          std::vector<WireWrite>& writes) {
  // Sorted by source, by destination as in its descriptor, and then by position in the list.
  std::vector<std::tuple<const MemoryRegion*, std::uint64_t, std::uint64_t, std::size_t>> order;
  order.reserve(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto& [source, destination, write] = list[i];
    order.emplace_back(source.get(), destination.key, destination.length, i);
  }
  std::ranges::sort(order);
  std::vector<ListedPart> parts;
  for (const auto& [from, key, length, number] : order) {
    const auto& [source, destination, write] = list[number];
    const ListedWrite* const first = parts.empty() ? nullptr : parts.back().first;
    if (!first || first->source.get() != from || first->destination.key != key ||
        first->destination.length != length) {
      parts.push_back({.first = &list[number]});
    }
    const std::size_t before = writes.size();
    if (auto good = plan_single(write, source->size(), destination.length, shards, writes); !good) {
      return Error{good.error().code,
                   "write " + std::to_string(number) + " of the list: " + good.error().text};
    }
    parts.back().count += writes.size() - before;
    parts.back().bytes += write.length;
  }
  return parts;
}

}  // namespace kvxfer
