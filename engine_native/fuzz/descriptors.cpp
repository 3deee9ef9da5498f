// Data that is passed on as bytes or text: MR descriptors, engine addresses, ends of NIC paths; and
// the writes that are planned with a peer's descriptor.
#include <array>

#include "bootstrap/bytes.hpp"
#include "fabric/local/region_message.hpp"
#include "fabric/ofi/path_endpoint.hpp"
#include "input.hpp"
#include "kvxfer/types.hpp"
#include "memory_region.hpp"
#include "paged_write.hpp"
#include "targets.hpp"
#ifdef KVXFER_HAVE_VERBS
#include "fabric/verbs/path_endpoint.hpp"
#endif

namespace kvxfer::fuzz {
namespace {

void mr_descriptor(Input& input) {
  const std::string_view bytes = input.rest();
  const auto descriptor = MrDescriptor::decode(bytes);
  if (!descriptor) return;
  const std::string written = descriptor->encode();
  const auto again = MrDescriptor::decode(written);
  require(again && again->encode() == written, "a descriptor reads as written");
}

void engine_address(Input& input) {
  const auto address = EngineAddress::parse(input.rest());
  if (!address) return;
  const auto again = EngineAddress::parse(address->text());
  require(again && again->text() == address->text(), "an address reads as written");
}

void nic_paths(Input& input) {
  const bool ofi = input.flag();
  const std::string_view bytes = input.rest();
  if (ofi) {
    const auto endpoint = ofi::PathEndpoint::decode(bytes);
    if (endpoint) require(endpoint->encode() == bytes, "an ofi endpoint reads as written");
    return;
  }
#ifdef KVXFER_HAVE_VERBS
  const auto endpoint = verbs::PathEndpoint::decode(bytes);
  if (endpoint) require(endpoint->encode() == bytes, "a verbs endpoint reads as written");
#endif
}

void region_message(Input& input) {
  const std::string_view bytes = input.rest();
  const auto message = local::RegionMessage::parse(bytes);
  if (message) require(bytes.starts_with(message->bytes()), "a region message reads as written");
  if (!local::GpuRegionMessage::parse(bytes)) return;
  require(!message, "a message is of one kind");
  const std::size_t files =
      (bytes.size() - sizeof(local::GpuRegionMessage)) / sizeof(std::uint64_t);
  const auto sizes = local::GpuRegionMessage::sizes(bytes, files);
  if (sizes) require(sizes->size() == files, "each file has a size");
}

// Requires that no planned write leaves either region, whatever length a descriptor claims.
void require_inside(std::span<const WireWrite> writes, std::uint64_t source,
                    std::uint64_t destination, std::uint64_t bytes) {
  std::uint64_t sum = 0;
  for (const WireWrite& write : writes) {
    require(write.length > 0 && write.length <= kMaxWriteBytes, "writes are of bounded length");
    require(write.source <= source && write.length <= source - write.source, "sources are inside");
    require(write.destination <= destination && write.length <= destination - write.destination,
            "destinations are inside");
    sum += write.length;
  }
  require(sum == bytes, "every byte is written once");
}

void single_write(Input& input) {
  constexpr std::uint64_t kSource = 64u << 20;
  const auto destination = input.get<std::uint64_t>();
  const SingleWrite write{.source_offset = input.number(),
                          .destination_offset = input.get<std::uint64_t>(),
                          .length = input.flag() ? input.number() : input.get<std::uint32_t>()};
  const unsigned shards = input.byte() % 65u;
  std::vector<WireWrite> writes;
  if (plan_single(write, kSource, destination, shards, writes)) {
    require_inside(writes, kSource, destination, write.length);
  }
}

void paged_write(Input& input) {
  constexpr std::uint64_t kSource = 1u << 20;
  const std::uint64_t destination = input.get<std::uint64_t>();
  PagedWrite pages{.page_length = input.number(),
                   .source_stride = input.number(),
                   .destination_stride = input.number(),
                   .source_offset = input.number(),
                   .destination_offset = input.number()};
  std::vector<std::int64_t> from;
  std::vector<std::int64_t> to;
  while (!input.empty() && from.size() < 4096) {
    from.push_back(static_cast<std::int64_t>(input.number()));
    to.push_back(static_cast<std::int64_t>(input.number()));
  }
  pages.source_pages = from;
  pages.destination_pages = to;
  std::vector<WireWrite> writes;
  if (plan_pages(pages, kSource, destination, writes)) {
    require_inside(writes, kSource, destination, from.size() * pages.page_length);
  }
}

void listed_writes(Input& input) {
  constexpr std::uint64_t kSource = 4096;
  std::array<std::byte, kSource> memory;
  std::array<RegionPtr, 2> sources;
  for (RegionPtr& source : sources) {
    auto region = MemoryRegion::wrap({}, memory.data(), memory.size());
    require(static_cast<bool>(region), "memory can be wrapped");
    source = *region;
  }
  std::array<MrDescriptor, 2> destinations{};
  for (MrDescriptor& each : destinations) {
    each.key = input.byte();
    each.length = input.number();
  }
  std::vector<ListedWrite> list;
  while (!input.empty() && list.size() < 256) {
    const std::uint8_t which = input.byte();
    list.push_back({.source = sources[which & 1u],
                    .destination = destinations[which >> 1u & 1u],
                    .write = {input.number(), input.number(), input.number()}});
  }
  std::vector<WireWrite> writes;
  const auto parts = plan_list(list, 1, writes);
  if (!parts) return;
  std::uint64_t asked = 0;
  for (const ListedWrite& each : list) asked += each.write.length;
  std::span<const WireWrite> left(writes);
  for (const ListedPart& part : *parts) {
    require(part.count <= left.size(), "a part has no more writes than there are");
    require_inside(left.first(part.count), kSource, part.first->destination.length, part.bytes);
    left = left.subspan(part.count);
    asked -= part.bytes;
  }
  require(left.empty() && asked == 0, "every write of a list is in one part");
}

}  // namespace

void descriptors(std::string_view bytes) {
  Input input(bytes);
  switch (input.below(7)) {
    case 0:
      return mr_descriptor(input);
    case 1:
      return engine_address(input);
    case 2:
      return nic_paths(input);
    case 3:
      return region_message(input);
    case 4:
      return single_write(input);
    case 6:
      return listed_writes(input);
    default:
      return paged_write(input);
  }
}

}  // namespace kvxfer::fuzz
