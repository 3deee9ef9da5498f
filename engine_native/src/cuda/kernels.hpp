// The engine's kernels, in PTX, which the driver compiles, so that the build needs no CUDA.
#pragma once

#include <cstdint>

namespace kvxfer::cuda {

// --- pages. Copies of single pages cost the driver 3 to 4 µs each (H200, docs/gpus.md); one
// launch moves any number of them, between any two memories that the GPU reaches.

// One copy. The addresses are of this process: device memory, or host memory that CUDA has pinned.
struct DeviceCopy {
  std::uint64_t source = 0;
  std::uint64_t destination = 0;
  std::uint32_t length = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(DeviceCopy) == 24);

// Block (i, j) moves the j-th kBytesPerBlock of copy i, so a grid has as many rows as the longest
// copy needs.
inline constexpr const char* kCopyKernel = "kvxfer_copy_pages";
inline constexpr unsigned kCopyThreads = 256;
inline constexpr std::uint32_t kBytesPerBlock = 16384;
constexpr unsigned rows_of(std::uint32_t longest) {
  return (longest + kBytesPerBlock - 1) / kBytesPerBlock;
}

// --- words that streams count up. The count is device memory, since not every host lets a GPU add
// to its memory; the word is pinned host memory.

// The parameter of void kvxfer_count(StreamCount count), which does, with one thread: *counter +=
// by, *word = *counter.
struct StreamCount {
  std::uint64_t counter = 0;
  std::uint64_t word = 0;
  std::uint64_t by = 0;
};
inline constexpr const char* kCountKernel = "kvxfer_count";

// --- both

// void kvxfer_copy_pages(const DeviceCopy* copies): 16 bytes per access if both addresses and
// the length allow it, else 1. Four accesses of a thread are under way at once. Streaming (.cs):
// these cache lines are not read again soon.
inline constexpr const char* kPtx = R"(
.version 7.0
.target sm_80
.address_size 64

.visible .entry kvxfer_copy_pages(.param .u64 copies)
.maxntid 256, 1, 1
{
  .reg .pred %outside, %bytewise, %p<4>;
  .reg .b16 %byte;
  .reg .b32 %copy, %begin, %length, %at, %a<4>, %b<4>, %c<4>, %d<4>;
  .reg .b64 %entry, %source, %destination, %wide, %from, %to;

  // The entry of this block's copy, and its part of that.
  ld.param.u64 %entry, [copies];
  mov.u32 %copy, %ctaid.x;
  mad.wide.u32 %entry, %copy, 24, %entry;
  mov.u32 %begin, %ctaid.y;
  shl.b32 %begin, %begin, 14;
  ld.global.u32 %length, [%entry+16];
  setp.ge.u32 %outside, %begin, %length;
  @%outside bra END;
  sub.u32 %length, %length, %begin;
  min.u32 %length, %length, 16384;
  cvt.u64.u32 %wide, %begin;
  ld.global.u64 %source, [%entry];
  add.u64 %source, %source, %wide;
  ld.global.u64 %destination, [%entry+8];
  add.u64 %destination, %destination, %wide;

  mov.u32 %at, %tid.x;
  cvt.u64.u32 %wide, %length;
  or.b64 %wide, %wide, %source;
  or.b64 %wide, %wide, %destination;
  and.b64 %wide, %wide, 15;
  setp.ne.u64 %bytewise, %wide, 0;
  @%bytewise bra BYTES;

  // Thread t has bytes 16 t, + 4096, + 8192 and + 12288.
  shl.b32 %at, %at, 4;
  cvt.u64.u32 %wide, %at;
  add.u64 %from, %source, %wide;
  add.u64 %to, %destination, %wide;
  setp.lt.u32 %p0, %at, %length;
  add.u32 %at, %at, 4096;
  setp.lt.u32 %p1, %at, %length;
  add.u32 %at, %at, 4096;
  setp.lt.u32 %p2, %at, %length;
  add.u32 %at, %at, 4096;
  setp.lt.u32 %p3, %at, %length;
  @%p0 ld.global.cs.v4.u32 {%a0, %a1, %a2, %a3}, [%from];
  @%p1 ld.global.cs.v4.u32 {%b0, %b1, %b2, %b3}, [%from+4096];
  @%p2 ld.global.cs.v4.u32 {%c0, %c1, %c2, %c3}, [%from+8192];
  @%p3 ld.global.cs.v4.u32 {%d0, %d1, %d2, %d3}, [%from+12288];
  @%p0 st.global.cs.v4.u32 [%to], {%a0, %a1, %a2, %a3};
  @%p1 st.global.cs.v4.u32 [%to+4096], {%b0, %b1, %b2, %b3};
  @%p2 st.global.cs.v4.u32 [%to+8192], {%c0, %c1, %c2, %c3};
  @%p3 st.global.cs.v4.u32 [%to+12288], {%d0, %d1, %d2, %d3};
  bra END;

BYTES:
  setp.ge.u32 %outside, %at, %length;
  @%outside bra END;
  cvt.u64.u32 %wide, %at;
  add.u64 %from, %source, %wide;
  add.u64 %to, %destination, %wide;
  ld.global.u8 %byte, [%from];
  st.global.u8 [%to], %byte;
  add.u32 %at, %at, 256;
  bra BYTES;

END:
  ret;
}

.visible .entry kvxfer_count(.param .align 8 .b8 count[24])
{
  .reg .b64 %counter, %word, %by, %total;
  ld.param.u64 %counter, [count];
  ld.param.u64 %word, [count+8];
  ld.param.u64 %by, [count+16];
  atom.global.add.u64 %total, [%counter], %by;
  add.u64 %total, %total, %by;
  st.release.sys.global.u64 [%word], %total;
  ret;
}
)";

}  // namespace kvxfer::cuda
