// Frames on a tcp lane. Little-endian, fixed-size header; docs/protocol.md has the picture.
#pragma once

#include <bit>
#include <cstdint>

namespace kvxfer::tcp {

static_assert(std::endian::native == std::endian::little);

enum class FrameType : std::uint8_t { writes = 1, ack = 2 };

struct WriteDescriptor {
  std::uint64_t offset;  // bytes from the start of the destination region
  std::uint32_t length;
  std::uint32_t grouped;  // see WireWrite; 0 in version 2
};
static_assert(sizeof(WriteDescriptor) == 16);

// `writes`: this header, then count - 1 further descriptors, then the payload of all writes in
// order. `ack`: batches up to `sequence` are done; the last of them ended with `status`.
struct FrameHeader {
  std::uint8_t type;
  std::uint8_t has_imm;
  std::uint16_t status;  // ack: an Errc
  std::uint32_t imm;
  std::uint64_t key_or_sequence;  // writes: destination region; ack: sequence
  std::uint32_t count;
  std::uint32_t reserved;
  WriteDescriptor first;  // inline, so that a single write costs no second read
};
static_assert(sizeof(FrameHeader) == 40);

// One batch is one sendmsg: header and descriptors take two of the kernel's 1,024 iovecs.
inline constexpr std::uint32_t kMaxBatchWrites = 1022;
inline constexpr std::uint64_t kMaxBatchBytes = 2u << 20;

}  // namespace kvxfer::tcp
