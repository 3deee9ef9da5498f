// Allocations, and what is asked about addresses.
#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "driver.hpp"

namespace kvxfer::cuda_double {
namespace {

CUdeviceptr address_of(const void* host) { return reinterpret_cast<CUdeviceptr>(host); }

CUmemorytype type_of(const Mapping& mapping) {
  return mapping.on_host() ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
}

// One attribute of an address; what an address without a mapping has is up to the caller.
CUresult attribute_of(const Mapping& mapping, CUpointer_attribute attribute, CUdeviceptr address,
                      void* data) {
  const auto put = [data](const auto& value) {
    std::memcpy(data, &value, sizeof value);
    return CUDA_SUCCESS;
  };
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      // Memory of cuMemCreate belongs to a device, not to a context.
      return put(mapping.kind == Kind::vmm ? CUcontext{} : mapping.context);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return put(type_of(mapping));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return put(address);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return mapping.on_host() ? put(address) : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return put(static_cast<unsigned int>(mapping.sync_memops));
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return put(static_cast<unsigned long long>(mapping.buffer_id));
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return put(0u);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return put(static_cast<int>(mapping.device));
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return put(static_cast<unsigned int>(mapping.kind == Kind::device));
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return put(mapping.base);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return put(mapping.size);
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return put(static_cast<unsigned int>(1));
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult free_mapping(CUdeviceptr base, Kind kind) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  if (!base) return CUDA_SUCCESS;
  const auto found = driver.memory.find(base);
  if (!found || found->base != base || found->kind != kind) return CUDA_ERROR_INVALID_VALUE;
  // It waits for all that may use the memory, as the driver does.
  if (Context* const owner = driver.of(found->context)) driver.synchronize(*owner);
  const auto removed = driver.memory.remove(base, kind);
  if (!removed) return CUDA_ERROR_INVALID_VALUE;
  driver.memory.end(*removed);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace kvxfer::cuda_double

using namespace kvxfer::cuda_double;

// --- device memory ---------------------------------------------------------------------------

CUresult CUDAAPI cuMemAlloc(CUdeviceptr* address, size_t size) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  if (!address || size == 0) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t whole = Memory::whole(size);
  auto backing = Backing::make(whole);
  const CUdeviceptr base = backing ? driver.memory.reserve(whole) : 0;
  if (!base) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = base;
  return driver.memory.add({.base = base,
                            .size = size,
                            .kind = Kind::device,
                            .context = Driver::stack().back(),
                            .device = context->device,
                            .backing = std::move(backing)});
}

CUresult CUDAAPI cuMemFree(CUdeviceptr address) { return free_mapping(address, Kind::device); }

CUresult CUDAAPI cuMemGetInfo(size_t* free, size_t* total) {
  Context* context = nullptr;
  if (const CUresult bad = Driver::instance().current(&context); bad != CUDA_SUCCESS) return bad;
  *total = std::size_t{8} << 30;
  *free = *total / 2;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  Context* context = nullptr;
  if (const CUresult bad = Driver::instance().current(&context); bad != CUDA_SUCCESS) return bad;
  const auto mapping = Driver::instance().memory.find(address);
  if (!mapping) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = mapping->base;
  if (size) *size = mapping->size;
  return CUDA_SUCCESS;
}

// --- host memory -----------------------------------------------------------------------------

CUresult CUDAAPI cuMemHostAlloc(void** host, size_t size, unsigned int) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  if (!host || size == 0) return CUDA_ERROR_INVALID_VALUE;
  void* const at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *host = at;
  return driver.memory.add({.base = address_of(at),
                            .size = size,
                            .kind = Kind::host,
                            .context = Driver::stack().back(),
                            .device = context->device});
}

CUresult CUDAAPI cuMemFreeHost(void* host) { return free_mapping(address_of(host), Kind::host); }

CUresult CUDAAPI cuMemHostRegister(void* host, size_t size, unsigned int) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  if (!host || size == 0) return CUDA_ERROR_INVALID_VALUE;
  const CUresult added = driver.memory.add({.base = address_of(host),
                                            .size = size,
                                            .kind = Kind::registered,
                                            .context = Driver::stack().back(),
                                            .device = context->device});
  return added == CUDA_ERROR_ALREADY_MAPPED ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : added;
}

CUresult CUDAAPI cuMemHostUnregister(void* host) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  const auto found = driver.memory.find(address_of(host));
  if (!found || found->kind != Kind::registered || found->base != address_of(host)) {
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  if (Context* const owner = driver.of(found->context)) driver.synchronize(*owner);
  driver.memory.remove(address_of(host), Kind::registered);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr* address, void* host, unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const auto mapping = Driver::instance().memory.find(address_of(host));
  if (!mapping || !mapping->on_host()) return CUDA_ERROR_INVALID_VALUE;
  *address = address_of(host);
  return CUDA_SUCCESS;
}

// --- questions -------------------------------------------------------------------------------

CUresult CUDAAPI cuPointerGetAttribute(void* data, CUpointer_attribute attribute,
                                       CUdeviceptr address) {
  if (!Driver::instance().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (!data) return CUDA_ERROR_INVALID_VALUE;
  const auto mapping = Driver::instance().memory.find(address);
  return mapping ? attribute_of(*mapping, attribute, address, data) : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes,
                                        void** data, CUdeviceptr address) {
  if (!Driver::instance().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  const auto mapping = Driver::instance().memory.find(address);
  for (unsigned int i = 0; i < count; ++i) {
    // What an address is not known for is zero, and no error.
    if (mapping) {
      attribute_of(*mapping, attributes[i], address, data[i]);
      continue;
    }
    const bool wide = attributes[i] == CU_POINTER_ATTRIBUTE_CONTEXT ||
                      attributes[i] == CU_POINTER_ATTRIBUTE_BUFFER_ID ||
                      attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ||
                      attributes[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER ||
                      attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR ||
                      attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE;
    std::memset(data[i], 0, wide ? sizeof(std::uint64_t) : sizeof(std::uint32_t));
    if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
      const int none = -2;
      std::memcpy(data[i], &none, sizeof none);
    }
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuPointerSetAttribute(const void* value, CUpointer_attribute attribute,
                                       CUdeviceptr address) {
  if (!Driver::instance().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  const auto mapping = Driver::instance().memory.find(address);
  if (!mapping || mapping->on_host() || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  unsigned int set = 0;
  std::memcpy(&set, value, sizeof set);
  mapping->sync_memops = set != 0;
  return CUDA_SUCCESS;
}
