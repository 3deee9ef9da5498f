// Tests whether a GPU reads the memory of another one correctly: behind an IOMMU, CUDA may offer it
// although reads return wrong bytes, without an error. Runs in the background.
#pragma once

#include <cstdint>

#include "cuda/gpu.hpp"
#include "kvxfer/error.hpp"

namespace kvxfer::local {

// Returns files of memory of the owner, whose bytes follow from the seed.
Result<cuda::FileParts> offer_probe(cuda::Gpu& owner, std::uint64_t seed);
// Fails if the reader finds other bytes there.
Result<void> read_probe(cuda::Gpu& reader, const cuda::FileParts& files, std::uint64_t seed);

}  // namespace kvxfer::local
