// Whether one GPU really reads what another one has: behind an IOMMU, CUDA may offer that, and
// reads give other bytes without an error. In the background.
#pragma once

#include <cstdint>

#include "cuda/gpu.hpp"
#include "kvxfer/error.hpp"

namespace kvxfer::local {

// Memory of the owner's, with bytes that follow from the seed.
Result<cuda::FileParts> offer_probe(cuda::Gpu& owner, std::uint64_t seed);
// Fails where the reader finds other bytes there.
Result<void> read_probe(cuda::Gpu& reader, const cuda::FileParts& files, std::uint64_t seed);

}  // namespace kvxfer::local
