// Devices and contexts.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "driver.hpp"

using kvxfer::cuda_double::Context;
using kvxfer::cuda_double::Driver;

namespace {

bool is_device(CUdevice device) { return Driver::instance().is_device(device); }

}  // namespace

CUresult CUDAAPI cuInit(unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return Driver::instance().initialise();
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  if (!Driver::instance().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  *count = Driver::instance().devices();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  if (!Driver::instance().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetName(char* name, int length, CUdevice device) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<std::size_t>(length), "double of a GPU, number %d",
                Driver::instance().physical(device));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::memset(uuid->bytes, 'd', sizeof uuid->bytes);
  uuid->bytes[15] = static_cast<char>(Driver::instance().physical(device));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(id, static_cast<std::size_t>(length), "0000:%02X:00.0",
                0x10 + Driver::instance().physical(device));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (const auto set = Driver::instance().attribute(attribute)) {
    *value = *set;
    return CUDA_SUCCESS;
  }
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
      *value = 1;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
      *value = CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
      *value = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      return CUDA_SUCCESS;
    default:
      *value = 0;
      return CUDA_SUCCESS;
  }
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return Driver::instance().retain(device, context);
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
  return Driver::instance().release(device);
}

CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice device) {
  return Driver::instance().reset(device);
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = Driver::instance().active(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
  Driver& driver = Driver::instance();
  if (!driver.initialised) return CUDA_ERROR_NOT_INITIALIZED;
  auto& stack = Driver::stack();
  if (context && !driver.of(context)) return CUDA_ERROR_INVALID_CONTEXT;
  if (!stack.empty()) stack.pop_back();
  if (context) stack.push_back(context);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
  if (!Driver::instance().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  const auto& stack = Driver::stack();
  *context = stack.empty() ? nullptr : stack.back();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
  Driver& driver = Driver::instance();
  if (!driver.initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (!driver.of(context)) return CUDA_ERROR_INVALID_CONTEXT;
  Driver::stack().push_back(context);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext* context) {
  auto& stack = Driver::stack();
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = stack.back();
  stack.pop_back();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
  Context* context = nullptr;
  if (const CUresult bad = Driver::instance().current(&context); bad != CUDA_SUCCESS) return bad;
  *device = context->device;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSynchronize() {
  Context* context = nullptr;
  Driver& driver = Driver::instance();
  if (const CUresult bad = driver.current_for_unsafe(&context); bad != CUDA_SUCCESS) return bad;
  driver.synchronize(*context);
  return context->sticky;
}

// --- peers -----------------------------------------------------------------------------------

CUresult CUDAAPI cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  if (!is_device(device) || !is_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer && Driver::instance().peers_reach ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return Driver::instance().set_peer(peer, true);
}

CUresult CUDAAPI cuCtxDisablePeerAccess(CUcontext peer) {
  return Driver::instance().set_peer(peer, false);
}

// --- errors ----------------------------------------------------------------------------------

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** name) {
  switch (error) {
#define NAME(code) \
  case code:       \
    *name = #code; \
    return CUDA_SUCCESS
    NAME(CUDA_SUCCESS);
    NAME(CUDA_ERROR_INVALID_VALUE);
    NAME(CUDA_ERROR_OUT_OF_MEMORY);
    NAME(CUDA_ERROR_NOT_INITIALIZED);
    NAME(CUDA_ERROR_NO_DEVICE);
    NAME(CUDA_ERROR_INVALID_DEVICE);
    NAME(CUDA_ERROR_INVALID_CONTEXT);
    NAME(CUDA_ERROR_ALREADY_MAPPED);
    NAME(CUDA_ERROR_INVALID_HANDLE);
    NAME(CUDA_ERROR_ILLEGAL_STATE);
    NAME(CUDA_ERROR_NOT_FOUND);
    NAME(CUDA_ERROR_NOT_READY);
    NAME(CUDA_ERROR_ILLEGAL_ADDRESS);
    NAME(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    NAME(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    NAME(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    NAME(CUDA_ERROR_CONTEXT_IS_DESTROYED);
    NAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    NAME(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    NAME(CUDA_ERROR_MPS_CLIENT_TERMINATED);
    NAME(CUDA_ERROR_NOT_PERMITTED);
    NAME(CUDA_ERROR_NOT_SUPPORTED);
    NAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    NAME(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    NAME(CUDA_ERROR_STREAM_CAPTURE_MERGE);
    NAME(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    NAME(CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    NAME(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    NAME(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    NAME(CUDA_ERROR_CAPTURED_EVENT);
    NAME(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
#undef NAME
    default:
      *name = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
}
