// Kinds of device memory besides cuMemAlloc's, and several devices. Cases hold on a GPU, too,
// unless they say that they are of the double alone.
#include <cstddef>

#include "doubles/cuda_driver.hpp"

using namespace kvxfer::test;

namespace {

template <typename Value>
Value attribute(CUpointer_attribute which, CUdeviceptr address) {
  Value value{};
  REQUIRE(CU(PointerGetAttribute)(&value, which, address) == CUDA_SUCCESS);
  return value;
}

bool shareable(CUdeviceptr address) {
  CUipcMemHandle handle{};
  return CU(IpcGetMemHandle)(&handle, address) == CUDA_SUCCESS;
}

// A second device's primary context, not current.
struct Second {
  Second() { REQUIRE(CU(DevicePrimaryCtxRetain)(&context, 1) == CUDA_SUCCESS); }
  ~Second() { CU(DevicePrimaryCtxRelease)(1); }
  Second(const Second&) = delete;
  Second& operator=(const Second&) = delete;

  CUdeviceptr allocate(std::size_t size) const {
    REQUIRE(CU(CtxPushCurrent)(context) == CUDA_SUCCESS);
    const CUdeviceptr address = kvxfer::test::allocate(size);
    CU(CtxPopCurrent)(nullptr);
    return address;
  }

  CUcontext context = nullptr;
};

}  // namespace

TEST_SUITE_BEGIN("cuda");

TEST_CASE("managed memory is accessible to the processor, and its attributes say so") {
  const CudaDriver driver;
  CUdeviceptr managed = 0;
  REQUIRE(CU(MemAllocManaged)(&managed, kBytes, CU_MEM_ATTACH_GLOBAL) == CUDA_SUCCESS);
  auto* const bytes = reinterpret_cast<volatile unsigned char*>(managed);
  bytes[0] = 3;
  CHECK(first_byte(managed) == 3);
  fill(managed, 4);
  REQUIRE(CU(CtxSynchronize)() == CUDA_SUCCESS);
  CHECK(bytes[kBytes - 1] == 4);
  CHECK(attribute<unsigned>(CU_POINTER_ATTRIBUTE_IS_MANAGED, managed) == 1);
  CHECK_FALSE(shareable(managed));
  CUdeviceptr none = 0;
  CHECK(CU(MemAllocManaged)(&none, kBytes, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(CU(MemFree)(managed) == CUDA_SUCCESS);
  CHECK(CU(MemFree)(managed) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("memory of a pool exists in the order of its stream, and cannot be exported") {
  const CudaDriver driver;
  const CUstream order = stream();
  CUdeviceptr pooled = 0;
  unsigned char byte = 0;
  REQUIRE(CU(MemAllocAsync)(&pooled, kBytes, order) == CUDA_SUCCESS);
  REQUIRE(CU(MemsetD8Async)(pooled, 8, kBytes, order) == CUDA_SUCCESS);
  REQUIRE(CU(MemcpyDtoHAsync)(&byte, pooled, 1, order) == CUDA_SUCCESS);
  REQUIRE(CU(StreamSynchronize)(order) == CUDA_SUCCESS);
  CHECK(byte == 8);
  CHECK(attribute<unsigned>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pooled) == CU_MEMORYTYPE_DEVICE);
  CUmemoryPool usual = nullptr;
  REQUIRE(CU(DeviceGetDefaultMemPool)(&usual, 0) == CUDA_SUCCESS);
  CHECK(attribute<CUmemoryPool>(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, pooled) == usual);
  CHECK(attribute<unsigned>(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pooled) == 0);
  CHECK_FALSE(shareable(pooled));
  const CUdeviceptr plain = allocate(kBytes);
  CHECK(attribute<CUmemoryPool>(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, plain) == nullptr);
  CU(MemFree)(plain);
  REQUIRE(CU(MemFreeAsync)(pooled, order) == CUDA_SUCCESS);
  REQUIRE(CU(StreamSynchronize)(order) == CUDA_SUCCESS);
  CU(StreamDestroy)(order);
}

TEST_CASE("the double: memory of a pool that is used too early or too late poisons the context") {
  for (const bool early : {true, false}) {
    CAPTURE(early);
    const CudaDriver driver;
    const CUstream order = stream();
    const CUstream other = stream();
    const CUdeviceptr plain = allocate(kBytes);
    CUdeviceptr pooled = 0;
    {
      Gate gate(early ? order : other);
      REQUIRE(CU(MemAllocAsync)(&pooled, kBytes, order) == CUDA_SUCCESS);
      REQUIRE(CU(MemcpyAsync)(plain, pooled, kBytes, other) == CUDA_SUCCESS);
      if (!early) {
        REQUIRE(CU(MemFreeAsync)(pooled, order) == CUDA_SUCCESS);
        REQUIRE(CU(StreamSynchronize)(order) == CUDA_SUCCESS);
        gate.open();
      }
      CHECK(CU(StreamSynchronize)(other) == CUDA_ERROR_ILLEGAL_ADDRESS);
      gate.open();
    }
  }
}

TEST_CASE("the double: a kernel accesses memory of another device if that is enabled") {
  const CudaDriver driver;
  const Second second;
  struct Arguments {
    CUdeviceptr address;
    decltype(&cuda_double_alias) alias;
    bool reached;
  } arguments{second.allocate(kBytes), DOUBLE(alias), false};
  const CUdeviceptr here = allocate(kBytes);
  const CUstream runs = stream();
  const auto touch = [](void* given) {
    auto& [address, alias, reached] = *static_cast<Arguments*>(given);
    reached = alias(address, 1) != nullptr;
    return true;
  };
  const auto reaches = [&] {
    REQUIRE(DOUBLE(launch)(runs, touch, &arguments) == CUDA_SUCCESS);
    REQUIRE(CU(StreamSynchronize)(runs) == CUDA_SUCCESS);
    return arguments.reached;
  };
  int can = 0;
  REQUIRE(CU(DeviceCanAccessPeer)(&can, 0, 1) == CUDA_SUCCESS);
  CHECK(can == 1);
  CHECK_FALSE(reaches());
  // A copy does not need that.
  fill(arguments.address, 5);
  REQUIRE(CU(MemcpyAsync)(here, arguments.address, kBytes, runs) == CUDA_SUCCESS);
  REQUIRE(CU(StreamSynchronize)(runs) == CUDA_SUCCESS);
  CHECK(first_byte(here) == 5);

  REQUIRE(CU(CtxEnablePeerAccess)(second.context, 0) == CUDA_SUCCESS);
  CHECK(CU(CtxEnablePeerAccess)(second.context, 0) == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
  CHECK(reaches());
  REQUIRE(CU(CtxDisablePeerAccess)(second.context) == CUDA_SUCCESS);
  CHECK(CU(CtxDisablePeerAccess)(second.context) == CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
  CHECK(CU(CtxEnablePeerAccess)(driver.context(), 0) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK_FALSE(reaches());
  CU(StreamDestroy)(runs);
  CU(MemFree)(here);
  CU(MemFree)(arguments.address);
}

// Runs in another process: see the next case.
TEST_CASE("of the devices only the second one" * doctest::skip()) {
  const CudaDriver driver;
  int devices = 0;
  REQUIRE(CU(DeviceGetCount)(&devices) == CUDA_SUCCESS);
  CHECK(devices == 1);
  CUdeviceptr opened = 0;
  CHECK(CU(IpcOpenMemHandle)(&opened, handle_from_parent(), CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) ==
        CUDA_ERROR_INVALID_DEVICE);
}

TEST_CASE("the double: a handle of a device that is not visible is not opened") {
  const CudaDriver driver;
  const CUdeviceptr memory = allocate(kBytes);
  CUipcMemHandle handle{};
  REQUIRE(CU(IpcGetMemHandle)(&handle, memory) == CUDA_SUCCESS);
  CHECK(run_with_handle("of the devices only the second one", handle, "1") == 0);
  CU(MemFree)(memory);
}

TEST_SUITE_END();
