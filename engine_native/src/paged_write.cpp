#include "paged_write.hpp"

#include <algorithm>
#include <string>

namespace kvxfer {
namespace {

class WriteList {
 public:
  explicit WriteList(std::size_t pages) { writes_.reserve(pages); }

  void append(std::uint64_t source, std::uint64_t destination, std::uint64_t length) {
    if (!writes_.empty()) {
      WireWrite& last = writes_.back();
      const std::uint64_t room = kMaxWriteBytes - last.length;
      if (last.source + last.length == source && last.destination + last.length == destination &&
          room >= length) {
        last.length += static_cast<std::uint32_t>(length);
        return;
      }
    }
    while (length > 0) {
      const std::uint64_t part = std::min<std::uint64_t>(length, kMaxWriteBytes);
      writes_.push_back({source, destination, static_cast<std::uint32_t>(part)});
      source += part;
      destination += part;
      length -= part;
    }
  }

  std::vector<WireWrite> take() { return std::move(writes_); }

 private:
  std::vector<WireWrite> writes_;
};

// The largest page index whose page still ends inside the region; -1 if none does.
std::int64_t last_page(std::uint64_t region, std::uint64_t offset, std::uint64_t stride,
                       std::uint64_t page_length) {
  if (offset > region || page_length > region - offset) return -1;
  if (stride == 0) return INT64_MAX;
  return static_cast<std::int64_t>((region - offset - page_length) / stride);
}

Error bad_page(const char* side, std::size_t position, std::int64_t page, std::int64_t last,
               std::uint64_t region) {
  return {Errc::out_of_bounds, std::string(side) + " page " + std::to_string(page) + " (position " +
                                   std::to_string(position) + " of the list) is outside the " +
                                   side + " region of " + std::to_string(region) + " bytes; " +
                                   (last < 0 ? "no page of this length and offset fits it"
                                             : "valid pages are 0 to " + std::to_string(last))};
}

}  // namespace

Result<std::vector<WireWrite>> plan_pages(const PagedWrite& pages, std::uint64_t source_size,
                                          std::uint64_t destination_size) {
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
  const auto last_source =
      last_page(source_size, pages.source_offset, pages.source_stride, pages.page_length);
  const auto last_destination = last_page(destination_size, pages.destination_offset,
                                          pages.destination_stride, pages.page_length);
  WriteList list(pages.source_pages.size());
  for (std::size_t i = 0; i < pages.source_pages.size(); ++i) {
    const auto source = pages.source_pages[i];
    const auto destination = pages.destination_pages[i];
    if (source < 0 || source > last_source) {
      return bad_page("source", i, source, last_source, source_size);
    }
    if (destination < 0 || destination > last_destination) {
      return bad_page("destination", i, destination, last_destination, destination_size);
    }
    list.append(pages.source_offset + static_cast<std::uint64_t>(source) * pages.source_stride,
                pages.destination_offset +
                    static_cast<std::uint64_t>(destination) * pages.destination_stride,
                pages.page_length);
  }
  return list.take();
}

Result<std::vector<WireWrite>> plan_single(const SingleWrite& write, std::uint64_t source_size,
                                           std::uint64_t destination_size) {
  if (write.length == 0) {
    return Error{Errc::invalid_argument,
                 "nothing to write: length is 0; use write_imm to send "
                 "an immediate without bytes"};
  }
  const auto check = [&](const char* side, std::uint64_t offset,
                         std::uint64_t size) -> Result<void> {
    if (offset <= size && write.length <= size - offset) return {};
    return Error{Errc::out_of_bounds, std::string(side) + " range of " +
                                          std::to_string(write.length) + " bytes at offset " +
                                          std::to_string(offset) + " leaves the region of " +
                                          std::to_string(size) + " bytes"};
  };
  if (auto good = check("source", write.source_offset, source_size); !good) return good.error();
  if (auto good = check("destination", write.destination_offset, destination_size); !good) {
    return good.error();
  }
  WriteList list(1);
  list.append(write.source_offset, write.destination_offset, write.length);
  return list.take();
}

}  // namespace kvxfer
