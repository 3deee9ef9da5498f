#include "fabric/local/gpu_probe.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <vector>

namespace kvxfer::local {
namespace {

constexpr std::size_t kWords = 8192;  // 16 pages of an IOMMU
constexpr std::uint32_t kBytes = kWords * sizeof(std::uint64_t);

// Returns words that are all different (splitmix64).
std::vector<std::uint64_t> words_of(std::uint64_t seed) {
  std::vector<std::uint64_t> words(kWords);
  for (std::uint64_t& word : words) {
    seed += 0x9e3779b97f4a7c15;
    word = seed;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
    word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
    word ^= word >> 31;
  }
  return words;
}

}  // namespace

Result<cuda::FileParts> offer_probe(cuda::Gpu& owner, std::uint64_t seed) {
  const auto words = words_of(seed);
  auto files = owner.file_with(std::as_bytes(std::span(words)));
  if (files) return files;
  return Error{files.error().code, "it cannot be tried: " + files.error().text};
}

Result<void> read_probe(cuda::Gpu& reader, const cuda::FileParts& files, std::uint64_t seed) {
  const auto memory = reader.import(files);
  if (!memory) return memory.error();
  if (!(*memory)->holds(0, kBytes)) {
    return Error{Errc::out_of_bounds, "the peer's probe is too small"};
  }
  const auto seen = reader.read_by_kernel((*memory)->base(), kBytes);
  if (!seen) return seen.error();
  const auto words = words_of(seed);
  if (std::ranges::equal(*seen, std::as_bytes(std::span(words)))) return {};
  return Error{Errc::fabric_unavailable,
               reader.label() +
                   " reads wrong bytes there, although CUDA offers it; set the IOMMU of this host "
                   "off or to passthrough, and ACS off on the bridges above its GPUs"};
}

}  // namespace kvxfer::local
