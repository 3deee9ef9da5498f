// The messages on the unix socket of a local path after the rendezvous.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/driver.hpp"

namespace kvxfer::local {

struct RegionMessage {
  // share comes with the region's memfd. share_gpu and probe_gpu begin a GpuRegionMessage, which
  // the other side answers with opened; with refused, followed by the reason; or with untried if a
  // probe of that GPU has to come first. closed answers the forget of an opened region.
  enum class Kind : std::uint32_t {
    share = 1,
    forget = 2,
    share_gpu = 3,
    opened = 4,
    refused = 5,
    probe_gpu = 6,
    untried = 7,
    closed = 8
  };
  static constexpr std::size_t kMostReason = 400;
  Kind kind;
  std::uint32_t number;
  std::uint64_t size;  // share: memfd bytes to the region's end; refused: reason bytes

  std::string_view bytes() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
  static std::optional<RegionMessage> parse(std::string_view bytes) {
    RegionMessage message;
    if (bytes.size() < sizeof message) return std::nullopt;
    std::memcpy(&message, bytes.data(), sizeof message);
    const std::size_t reason = message.kind == Kind::refused ? message.size : 0;
    if (reason > kMostReason || bytes.size() != sizeof message + reason) return std::nullopt;
    const bool known = message.kind == Kind::share || message.kind == Kind::forget ||
                       message.kind == Kind::opened || message.kind == Kind::refused ||
                       message.kind == Kind::untried || message.kind == Kind::closed;
    return known ? std::optional(message) : std::nullopt;
  }
};
static_assert(sizeof(RegionMessage) == 16);

// The most regions of GPUs that an engine keeps open for a peer.
inline constexpr std::size_t kMostGpuRegions = 8192;

// A region of a GPU's memory that one GPU of the peer is to read. It is given by the handle of its
// allocation, by files of its allocations, whose sizes follow, or, if both engines are in one
// process, by its address. Or a probe: a file of memory with known bytes.
struct GpuRegionMessage {
  static constexpr std::uint64_t kMostPart = std::uint64_t{1} << 46;
  RegionMessage head;
  std::uint64_t offset;   // the region's, in those allocations
  std::uint64_t address;  // the region's, in the sender's process
  std::uint64_t reader;   // the reading GPU's number at the receiver
  cuda::IpcHandle handle;
  cuda::Uuid owner;    // the GPU that has the memory
  std::uint64_t seed;  // seed of a probe's bytes

  std::string_view bytes() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
  static std::optional<GpuRegionMessage> parse(std::string_view bytes) {
    GpuRegionMessage message;
    if (bytes.size() < sizeof message) return std::nullopt;
    std::memcpy(&message, bytes.data(), sizeof message);
    const bool known = message.head.kind == RegionMessage::Kind::share_gpu ||
                       message.head.kind == RegionMessage::Kind::probe_gpu;
    return known ? std::optional(message) : std::nullopt;
  }
  // Returns a size for each file that came with the message; nullopt if it is malformed.
  static std::optional<std::vector<std::uint64_t>> sizes(std::string_view bytes,
                                                         std::size_t files) {
    if (bytes.size() != sizeof(GpuRegionMessage) + files * sizeof(std::uint64_t)) {
      return std::nullopt;
    }
    std::vector<std::uint64_t> sizes(files);
    const std::string_view behind = bytes.substr(sizeof(GpuRegionMessage));
    if (!behind.empty()) std::memcpy(sizes.data(), behind.data(), behind.size());
    const bool fit =
        std::all_of(sizes.begin(), sizes.end(), [](auto size) { return size <= kMostPart; });
    return fit ? std::optional(std::move(sizes)) : std::nullopt;
  }
};
static_assert(sizeof(GpuRegionMessage) == 128);

}  // namespace kvxfer::local
