// Device memory at the engine's door, on the double of a driver or on a GPU.
#include <string>

#include "cuda/device_memory.hpp"
#include "cuda/driver_types.hpp"
#include "cuda_driver.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

static_assert(cuda::kMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(cuda::kIsManaged == CU_POINTER_ATTRIBUTE_IS_MANAGED);
static_assert(cuda::kDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(cuda::kOnDevice == CU_MEMORYTYPE_DEVICE);
static_assert(sizeof(CUpointer_attribute) == sizeof(int) && sizeof(CUresult) == sizeof(int));
static_assert(sizeof(CUdeviceptr) == sizeof(unsigned long long));

TEST_SUITE_BEGIN("cuda");

TEST_CASE("the engine knows a device's memory from the host's") {
  const CudaDriver driver;
  CUdeviceptr device = 0;
  REQUIRE(CU(MemAlloc)(&device, 4096) == CUDA_SUCCESS);
  void* pinned = nullptr;
  REQUIRE(CU(MemHostAlloc)(&pinned, 4096, 0) == CUDA_SUCCESS);
  const int plain = 0;
  CHECK(cuda::device_at(reinterpret_cast<void*>(device)) == 0);
  CHECK(cuda::device_at(reinterpret_cast<void*>(device + 4095)) == 0);
  CHECK(!cuda::device_at(pinned));
  CHECK(!cuda::device_at(&plain));
  CU(MemFree)(device);
  CHECK(!cuda::device_at(reinterpret_cast<void*>(device)));
  CU(MemFreeHost)(pinned);
}

TEST_CASE("device memory is refused by name, and pinned host memory is not") {
  const CudaDriver driver;
  TestEngine engine(options_for("tcp", "engine"));
  CUdeviceptr device = 0;
  REQUIRE(CU(MemAlloc)(&device, 4096) == CUDA_SUCCESS);
  const auto refused = engine->register_memory(reinterpret_cast<void*>(device), 4096);
  REQUIRE(!refused);
  CHECK(refused.error().code == Errc::invalid_argument);
  CHECK_MESSAGE(refused.error().text.find("memory of GPU 0") != std::string::npos,
                refused.error().text);
  void* pinned = nullptr;
  REQUIRE(CU(MemHostAlloc)(&pinned, 4096, 0) == CUDA_SUCCESS);
  good(engine->deregister(good(engine->register_memory(pinned, 4096))));
  CU(MemFreeHost)(pinned);
  CU(MemFree)(device);
}

TEST_SUITE_END();
