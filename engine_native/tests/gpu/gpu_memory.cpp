#include "gpu/gpu_memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace kvxfer::test {

Memory::Memory(TestEngine& engine, bool on_gpu, std::size_t size)
    : engine_(engine),
      region_(good(on_gpu ? engine->allocate_on_gpu(0, size) : engine->allocate(size))) {}

Memory::~Memory() { good(engine_->deregister(region_)); }

Bytes Memory::read(std::size_t offset, std::size_t size) const {
  Bytes bytes(size);
  if (region_->host()) {
    std::copy_n(region_->host() + offset, size, bytes.begin());
  } else {
    REQUIRE(CU(MemcpyDtoH)(bytes.data(), region_->address() + offset, size) == CUDA_SUCCESS);
  }
  return bytes;
}

void Memory::write(std::size_t offset, const Bytes& bytes) const {
  if (region_->host()) {
    std::copy(bytes.begin(), bytes.end(), region_->host() + offset);
  } else {
    REQUIRE(CU(MemcpyHtoD)(region_->address() + offset, bytes.data(), bytes.size()) ==
            CUDA_SUCCESS);
  }
}

Sleeper::Sleeper(std::size_t blocks, bool files) : files_(files), handles_(blocks) {
  REQUIRE(CU(MemAddressReserve)(&address_, size(), 0, 0, 0) == CUDA_SUCCESS);
}

Sleeper::~Sleeper() { CU(MemAddressFree)(address_, size()); }

void Sleeper::wake() {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.allocFlags.gpuDirectRDMACapable = 1;
  if (files_) wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUdeviceptr at = address_;
  for (CUmemGenericAllocationHandle& handle : handles_) {
    REQUIRE(CU(MemCreate)(&handle, kBlock, &wanted, 0) == CUDA_SUCCESS);
    REQUIRE(CU(MemMap)(std::exchange(at, at + kBlock), kBlock, 0, handle, 0) == CUDA_SUCCESS);
  }
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  REQUIRE(CU(MemSetAccess)(address_, size(), &access, 1) == CUDA_SUCCESS);
}

void Sleeper::sleep() const {
  REQUIRE(CU(MemUnmap)(address_, size()) == CUDA_SUCCESS);
  for (const auto handle : handles_) REQUIRE(CU(MemRelease)(handle) == CUDA_SUCCESS);
}

Bytes random_bytes_of(Random& random, std::size_t size) {
  Bytes bytes(size);
  random.fill(bytes.data(), size);
  return bytes;
}

std::vector<std::string> gpu_fabrics() {
  std::vector<std::string> fabrics{"tcp", "local"};
  if (std::getenv("KVXFER_TEST_CUDA")) return fabrics;
  for (const char* const nics : {"mlx5", "efa"}) {
    const auto& all = all_fabrics();
    if (std::find(all.begin(), all.end(), nics) != all.end()) fabrics.emplace_back(nics);
  }
  return fabrics;
}

}  // namespace kvxfer::test
