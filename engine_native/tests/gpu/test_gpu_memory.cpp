// Device memory in calls of the engine, on the double of a driver or on a GPU.
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>

#include "cuda/driver.hpp"
#include "cuda/gpus.hpp"
#include "doubles/cuda_driver.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

// The constants of cuda/driver.hpp, which does not include cuda.h.
static_assert(cuda::kSuccess == CUDA_SUCCESS && cuda::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(cuda::kInvalidContext == CUDA_ERROR_INVALID_CONTEXT &&
              cuda::kInvalidHandle == CUDA_ERROR_INVALID_HANDLE);
static_assert(cuda::kCapturing == CU_STREAM_CAPTURE_STATUS_ACTIVE &&
              cuda::kAtLeast == CU_STREAM_WAIT_VALUE_GEQ);
static_assert(cuda::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(cuda::kHostPageTables ==
              CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
static_assert(cuda::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(cuda::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(cuda::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(cuda::kContextOf == CU_POINTER_ATTRIBUTE_CONTEXT);
static_assert(cuda::kMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(cuda::kIsManaged == CU_POINTER_ATTRIBUTE_IS_MANAGED);
static_assert(cuda::kDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(cuda::kOnDevice == CU_MEMORYTYPE_DEVICE);
static_assert(cuda::kNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(cuda::kHostPointers == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
static_assert(cuda::kWideWords == CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
static_assert(cuda::kPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(cuda::kLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(cuda::kRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(cuda::kSyncMemops == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
static_assert(cuda::kRdmaFlushOptions == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);
static_assert(cuda::kRdmaWritesOrdering == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
static_assert(cuda::kFlushByHost == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST);
static_assert(cuda::kOrderedForOwner == CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER);
static_assert(cuda::kFlushContext == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX);
static_assert(cuda::kFlushForOwner == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
static_assert(cuda::kDmabuf == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD);
static_assert(cuda::kPosixFile == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(cuda::kPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(cuda::kLeast == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(cuda::kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(cuda::kReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(sizeof(cuda::MemAccess) == sizeof(CUmemAccessDesc));
static_assert(offsetof(cuda::MemAccess, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(sizeof(cuda::AllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(cuda::AllocationProperties, handle_types) ==
              offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(cuda::AllocationProperties, location_type) ==
              offsetof(CUmemAllocationProp, location));
static_assert(offsetof(cuda::AllocationProperties, flags) ==
              offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(cuda::Uuid) == sizeof(CUuuid));
static_assert(sizeof(cuda::AllocationHandle) == sizeof(CUmemGenericAllocationHandle));
static_assert(sizeof(cuda::IpcHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(cuda::Address) == sizeof(CUdeviceptr));
static_assert(sizeof(CUpointer_attribute) == sizeof(int) && sizeof(CUresult) == sizeof(int));

TEST_SUITE_BEGIN("cuda");

namespace {

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

TEST_CASE("the engine distinguishes a device's memory from the host's") {
  const CudaDriver driver;
  cuda::Gpus gpus;
  const CUdeviceptr device = allocate(kBytes);
  void* pinned = nullptr;
  REQUIRE(CU(MemHostAlloc)(&pinned, kBytes, 0) == CUDA_SUCCESS);
  const int plain = 0;
  CHECK(good(gpus.owner_of(pointer(device), kBytes))->device() == 0);
  CHECK(good(gpus.owner_of(pointer(device + kBytes - 1), 1))->device() == 0);
  CHECK(!good(gpus.owner_of(pinned, kBytes)));
  CHECK(!good(gpus.owner_of(&plain, sizeof plain)));
  CU(MemFree)(device);
  CHECK(!good(gpus.owner_of(pointer(device), kBytes)));
  CU(MemFreeHost)(pinned);
}

TEST_CASE("a region of a GPU names the GPU, and has no bytes for the processor") {
  const CudaDriver driver;
  TestEngine engine(options_for("tcp", "engine"));
  const CUdeviceptr device = allocate(kBytes);
  const RegionPtr region = good(engine->register_memory(pointer(device), kBytes));
  CHECK(region->host() == nullptr);
  CHECK(bytes_of(region).empty());
  CHECK(region->address() == device);
  const MrDescriptor descriptor = good(MrDescriptor::decode(descriptor_of(region).encode()));
  CHECK(descriptor.kind == MemoryKind::cuda);
  CHECK(descriptor.device == 0);
  good(engine->deregister(region));
  CU(MemFree)(device);
}

TEST_CASE("an engine allocates zeroed memory on a GPU, and frees it with the region") {
  const CudaDriver driver;
  TestEngine engine(options_for("tcp", "engine"));
  cuda::Gpus gpus;
  good(gpus.open(0));  // otherwise it would allocate where the region was
  RegionPtr region = good(engine->allocate_on_gpu(0, kBytes));
  CHECK(first_byte(region->address()) == 0);
  good(engine->deregister(region));
  const std::uint64_t address = region->address();
  region.reset();
  // Another thread frees it. That may happen between two queries of CUDA, which then contradict
  // each other; such memory is refused.
  const auto held = [&] {
    const auto owner = gpus.owner_of(pointer(address), 1);
    return owner && *owner;
  };
  while (held()) std::this_thread::yield();
}

TEST_CASE("the error names GPU memory that cannot be registered") {
  const CudaDriver driver;
  TestEngine engine(options_for("tcp", "engine"));
  const auto says = [](const auto& refused, Errc code, const char* text) {
    REQUIRE(!refused);
    CHECK(refused.error().code == code);
    CHECK_MESSAGE(refused.error().text.find(text) != std::string::npos, refused.error().text);
  };
  const CUdeviceptr device = allocate(kBlock);
  says(engine->register_memory(pointer(device), kBlock + 1), Errc::out_of_bounds,
       "leave the memory of GPU 0");
  CU(MemFree)(device);
  says(engine->allocate_on_gpu(77, kBytes), Errc::invalid_argument, "there is no GPU 77");
  says(engine->allocate_on_gpu(0, 0), Errc::invalid_argument, "at least 1 byte");
  says(engine->allocate_on_gpu(0, std::size_t{1} << 50), Errc::out_of_memory, "of GPU 0");
}

TEST_SUITE_END();
