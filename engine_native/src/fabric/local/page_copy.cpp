#include "fabric/local/page_copy.hpp"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvxfer::local {
namespace {

#if defined(__x86_64__)

constexpr std::size_t kLine = 64;
constexpr std::size_t kPrefetchBytes = 512;
// Below this a plain copy is faster.
constexpr std::size_t kStreamFrom = 512;

__attribute__((target("avx2"))) void stream_lines(const std::byte* source, std::byte* destination,
                                                  std::size_t lines) {
  for (std::size_t i = 0; i < lines; ++i, source += kLine, destination += kLine) {
    const auto low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    const auto high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(destination), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + 32), high);
  }
}

void prefetch(const PageCopy& copy) {
  for (std::size_t at = 0; at < copy.length && at < kPrefetchBytes; at += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(copy.source) + at, _MM_HINT_T0);
  }
}

void stream_copy(const PageCopy& copy) {
  const std::byte* source = copy.source;
  std::byte* destination = copy.destination;
  std::size_t left = copy.length;
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(destination) % kLine) % kLine;
  if (head > 0) {
    std::memcpy(destination, source, head);
    source += head;
    destination += head;
    left -= head;
  }
  const std::size_t lines = left / kLine;
  stream_lines(source, destination, lines);
  std::memcpy(destination + lines * kLine, source + lines * kLine, left % kLine);
}

void copy_streaming(std::span<const PageCopy> copies) {
  for (std::size_t i = 0; i < copies.size(); ++i) {
    if (i + 1 < copies.size()) prefetch(copies[i + 1]);
    if (copies[i].length < kStreamFrom) {
      std::memcpy(copies[i].destination, copies[i].source, copies[i].length);
    } else {
      stream_copy(copies[i]);
    }
  }
  _mm_sfence();  // streamed bytes are visible before anything that is stored after them
}

const bool kCanStream = __builtin_cpu_supports("avx2") != 0;

#endif

}  // namespace

void copy_pages(std::span<const PageCopy> copies) {
#if defined(__x86_64__)
  if (kCanStream) return copy_streaming(copies);
#endif
  for (const PageCopy& copy : copies) {
    std::memcpy(copy.destination, copy.source, copy.length);
  }
}

}  // namespace kvxfer::local
