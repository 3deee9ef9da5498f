// Allocations, and queries of addresses.
#include <sys/file.h>
#include <sys/mman.h>

#include <cstring>
#include <optional>
#include <utility>

#include "driver.hpp"

namespace kvxfer::cuda_double {
namespace {

CUdeviceptr address_of(const void* host) { return reinterpret_cast<CUdeviceptr>(host); }

// Returns null if there is no more.
void* host_memory(std::size_t size) {
  void* const at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

CUmemorytype type_of(const Mapping& mapping) {
  return mapping.on_host() ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
}

// True if the memory belongs to a device, not to a context.
bool of_device(const Mapping& mapping) {
  return mapping.kind == Kind::vmm || mapping.kind == Kind::pool;
}

// A device has one pool, its default.
CUmemoryPool pool_of(CUdevice device) {
  return reinterpret_cast<CUmemoryPool>(static_cast<std::uintptr_t>(0x100 + device));
}

// Gets an attribute of a mapped address; the caller handles addresses without a mapping.
CUresult attribute_of(const Mapping& mapping, CUpointer_attribute attribute, CUdeviceptr address,
                      void* data) {
  const auto put = [data](const auto& value) {
    std::memcpy(data, &value, sizeof value);
    return CUDA_SUCCESS;
  };
  const auto reservation = Driver::instance().memory.reservation_of(address);
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return put(of_device(mapping) ? CUcontext{} : mapping.context);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return put(type_of(mapping));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return put(address);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return mapping.backing ? CUDA_ERROR_INVALID_VALUE : put(address);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return put(static_cast<unsigned int>(mapping.sync_memops));
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return put(static_cast<unsigned long long>(mapping.buffer_id));
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return put(static_cast<unsigned int>(mapping.kind == Kind::managed));
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return put(static_cast<int>(mapping.device));
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return put(static_cast<unsigned int>(mapping.kind == Kind::device));
    // The range in which memory may be mapped; cuMemGetAddressRange() returns the mapped one
    // (cuda.h).
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return put(mapping.kind == Kind::vmm ? reservation.first : mapping.base);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return put(mapping.kind == Kind::vmm ? reservation.second : mapping.size);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return put(mapping.kind == Kind::pool ? pool_of(mapping.device) : CUmemoryPool{});
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      return put(static_cast<unsigned int>(mapping.kind == Kind::device ||
                                           (mapping.kind == Kind::vmm && mapping.mappable())));
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return put(static_cast<unsigned int>(1));
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult free_mapping(CUdeviceptr base, Kind kind) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current_for_unsafe(&context); bad != CUDA_SUCCESS) return bad;
  if (!base) return CUDA_SUCCESS;
  const auto found = driver.memory.find(base);
  if (!found || found->base != base || found->kind != kind) return CUDA_ERROR_INVALID_VALUE;
  // Waits for all work that may use the memory, as the driver does, except for memory of a pool.
  Context* const owner = kind == Kind::pool ? nullptr : driver.of(found->context);
  std::optional<Exclusive> exclusive;
  if (owner) exclusive.emplace(*owner);
  // A process that has the memory open holds a shared lock.
  const bool open = kind == Kind::device && ::flock(found->backing->fd(), LOCK_EX | LOCK_NB) != 0;
  if (open) context->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
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
  if (const CUresult bad = driver.current_for_unsafe(&context); bad != CUDA_SUCCESS) return bad;
  if (!address || size == 0) return CUDA_ERROR_INVALID_VALUE;
  const Exclusive exclusive(*context);
  const std::size_t whole = Memory::whole(size);
  auto backing = Backing::make(whole, driver.physical(context->device));
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

// Also frees managed memory and memory of a pool.
CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
  const auto found = Driver::instance().memory.find(address);
  const bool other = found && (found->kind == Kind::managed || found->kind == Kind::pool);
  return free_mapping(address, other ? found->kind : Kind::device);
}

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr* address, size_t size, unsigned int flags) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current_for_unsafe(&context); bad != CUDA_SUCCESS) return bad;
  if (!address || size == 0 || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const Exclusive exclusive(*context);
  void* const at = host_memory(size);
  if (!at) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = address_of(at);
  return driver.memory.add({.base = *address,
                            .size = size,
                            .kind = Kind::managed,
                            .context = Driver::stack().back(),
                            .device = context->device});
}

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

// --- memory of a pool, in the order of a stream ------------------------------------------------

CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  if (!pool || !Driver::instance().is_device(device)) return CUDA_ERROR_INVALID_VALUE;
  *pool = pool_of(device);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr* address, size_t size, CUstream stream) {
  Driver& driver = Driver::instance();
  Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  if (!address || size == 0) return CUDA_ERROR_INVALID_VALUE;
  if (place.capture) return CUDA_ERROR_NOT_SUPPORTED;
  const CUdevice device = place.context->device;
  const std::size_t whole = Memory::whole(size);
  auto backing = Backing::make(whole, driver.physical(device));
  *address = backing ? driver.memory.reserve(whole) : 0;
  if (!*address) return CUDA_ERROR_OUT_OF_MEMORY;
  return driver.memory.add({.base = *address,
                            .size = size,
                            .kind = Kind::pool,
                            .context = place.context->handle,
                            .device = device,
                            .backing = std::move(backing),
                            .allocated = place.enqueue([] {})});
}

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  Driver& driver = Driver::instance();
  Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  const auto found = driver.memory.find(address);
  if (!found || found->kind != Kind::pool || found->base != address) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (place.capture) return CUDA_ERROR_NOT_SUPPORTED;
  Context& context = *place.context;
  place.enqueue([&driver, &context, address] {
    if (const auto removed = driver.memory.remove(address, Kind::pool)) {
      driver.memory.end(*removed);
    } else {
      context.sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
    }
  });
  return CUDA_SUCCESS;
}

// --- host memory -----------------------------------------------------------------------------

CUresult CUDAAPI cuMemHostAlloc(void** host, size_t size, unsigned int) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current_for_unsafe(&context); bad != CUDA_SUCCESS) return bad;
  if (!host || size == 0) return CUDA_ERROR_INVALID_VALUE;
  const Exclusive exclusive(*context);
  void* const at = host_memory(size);
  if (!at) return CUDA_ERROR_OUT_OF_MEMORY;
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
  if (const CUresult bad = driver.current_for_unsafe(&context); bad != CUDA_SUCCESS) return bad;
  if (!host || size == 0) return CUDA_ERROR_INVALID_VALUE;
  const Exclusive exclusive(*context);
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
  if (const CUresult bad = driver.current_for_unsafe(&context); bad != CUDA_SUCCESS) return bad;
  const auto found = driver.memory.find(address_of(host));
  if (!found || found->kind != Kind::registered || found->base != address_of(host)) {
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  Context* const owner = driver.of(found->context);
  std::optional<Exclusive> exclusive;
  if (owner) exclusive.emplace(*owner);
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

// --- queries ---------------------------------------------------------------------------------

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
    // An attribute that is not known is zero, without an error.
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
  if (mapping->kind == Kind::vmm || mapping->kind == Kind::pool) return CUDA_ERROR_NOT_SUPPORTED;
  unsigned int set = 0;
  std::memcpy(&set, value, sizeof set);
  mapping->sync_memops = set != 0;
  return CUDA_SUCCESS;
}
