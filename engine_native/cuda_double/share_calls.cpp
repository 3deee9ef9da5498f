// Memory shared with other processes: legacy handles, cuMemCreate with descriptors, dmabuf.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>

#include "driver.hpp"

namespace kvxfer::cuda_double {
namespace {

// The content of a legacy handle; the memory is found through the exporting process.
struct Exported {
  std::uint64_t magic;
  std::uint64_t inode;  // the memfd's; a later descriptor of that number has another
  std::uint64_t size;
  pid_t process;
  int fd;
};
static_assert(sizeof(Exported) <= CU_IPC_HANDLE_SIZE);
constexpr std::uint64_t kMagic = 0x6375'6461'2069'7063;

bool whole(std::size_t size) { return size > 0 && size == Memory::whole(size); }

std::uint64_t inode_of(int fd) {
  struct stat found{};
  return ::fstat(fd, &found) == 0 ? found.st_ino : 0;
}

}  // namespace
}  // namespace kvxfer::cuda_double

using kvxfer::UniqueFd;
using namespace kvxfer::cuda_double;

// --- legacy handles --------------------------------------------------------------------------

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  const auto mapping = driver.memory.find(address);
  if (!handle || !mapping || mapping->kind != Kind::device) return CUDA_ERROR_INVALID_VALUE;
  // The handle is of the whole allocation, wherever in it the address is.
  const Exported exported{.magic = kMagic,
                          .inode = inode_of(mapping->backing->fd()),
                          .size = mapping->size,
                          .process = ::getpid(),
                          .fd = mapping->backing->fd()};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &exported, sizeof exported);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle,
                                    unsigned int flags) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  Exported exported{};
  std::memcpy(&exported, &handle, sizeof exported);
  if (!address || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || exported.magic != kMagic) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (exported.process == ::getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  const std::string path =
      "/proc/" + std::to_string(exported.process) + "/fd/" + std::to_string(exported.fd);
  UniqueFd memfd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!memfd || inode_of(memfd.get()) != exported.inode) return CUDA_ERROR_INVALID_HANDLE;
  ::flock(memfd.get(), LOCK_SH);  // cuMemFree() sees the lock until the memory is closed
  auto backing = Backing::adopt(std::move(memfd));
  if (!backing) return CUDA_ERROR_INVALID_HANDLE;
  const CUdevice device = driver.visible(backing->device());
  if (device < 0) return CUDA_ERROR_INVALID_DEVICE;
  if (device != context->device && !driver.peers_reach) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const CUdeviceptr base = driver.memory.reserve(backing->size());
  if (!base) return CUDA_ERROR_MAP_FAILED;
  *address = base;
  return driver.memory.add({.base = base,
                            .size = exported.size,
                            .kind = Kind::imported,
                            .context = Driver::stack().back(),
                            .device = device,
                            .backing = std::move(backing)});
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr address) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  const auto found = driver.memory.find(address);
  if (!found || found->kind != Kind::imported || found->base != address) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  driver.synchronize(*context);
  const auto removed = driver.memory.remove(address, Kind::imported);
  ::flock(removed->backing->fd(), LOCK_UN);
  driver.memory.end(*removed);
  return CUDA_SUCCESS;
}

// --- cuMemCreate -----------------------------------------------------------------------------

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                               CUmemAllocationGranularity_flags) {
  *granularity = Memory::kGranularity;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                             const CUmemAllocationProp* properties, unsigned long long flags) {
  Driver& driver = Driver::instance();
  if (!driver.initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (!handle || !properties || flags != 0 || !whole(size) ||
      properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      !driver.is_device(properties->location.id)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto backing = Backing::make(size, driver.physical(properties->location.id));
  if (!backing) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = driver.memory.keep({.backing = std::move(backing), .properties = *properties});
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  return Driver::instance().memory.release(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr,
                                     unsigned long long flags) {
  Driver& driver = Driver::instance();
  if (!driver.initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (!address || flags != 0 || !whole(size)) return CUDA_ERROR_INVALID_VALUE;
  *address = driver.memory.reserve(size);
  if (!*address) return CUDA_ERROR_OUT_OF_MEMORY;
  driver.memory.add_reservation(*address, size);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t size) {
  Driver& driver = Driver::instance();
  if (!driver.memory.remove_reservation(address, size)) return CUDA_ERROR_INVALID_VALUE;
  driver.memory.give_back(address, size);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags) {
  Driver& driver = Driver::instance();
  const auto physical = driver.memory.physical(handle);
  if (!physical || flags != 0 || offset != 0 || size != physical->backing->size() ||
      !driver.memory.reserved(address, size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return driver.memory.add({.base = address,
                            .size = size,
                            .kind = Kind::vmm,
                            .device = physical->properties.location.id,
                            .backing = physical->backing,
                            .physical = *physical});
}

// Returns a handle of the memory that is mapped there, to be released like any other.
CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  Driver& driver = Driver::instance();
  const auto mapping = driver.memory.find(reinterpret_cast<CUdeviceptr>(address));
  if (!handle || !mapping || !mapping->physical) return CUDA_ERROR_INVALID_VALUE;
  *handle = driver.memory.keep(*mapping->physical);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access,
                                size_t count) {
  Driver& driver = Driver::instance();
  for (CUdeviceptr at = address; at < address + size;) {
    const auto mapping = driver.memory.find(at);
    if (!mapping || mapping->kind != Kind::vmm || mapping->base != at) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    for (std::size_t i = 0; i < count; ++i) {
      const CUdevice device = access[i].location.id;
      if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || !driver.is_device(device)) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      if (device != mapping->device && !driver.peers_reach) {
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
      }
      if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
        mapping->access.insert(device);
      } else {
        mapping->access.erase(device);
      }
    }
    at += mapping->size;
  }
  return CUDA_SUCCESS;
}

// Waits for nothing: work that still uses the memory uses an illegal address.
CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t size) {
  Driver& driver = Driver::instance();
  for (CUdeviceptr at = address; at < address + size;) {
    const auto mapping = driver.memory.find(at);
    if (!mapping || mapping->kind != Kind::vmm || mapping->base != at) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    driver.memory.remove(at, Kind::vmm);
    at += mapping->size;
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemExportToShareableHandle(void* to, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type,
                                              unsigned long long flags) {
  const auto physical = Driver::instance().memory.physical(handle);
  if (!to || !physical || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  // The handle type has to be requested when the memory is made.
  if ((physical->properties.requestedHandleTypes & type) == 0) return CUDA_ERROR_INVALID_VALUE;
  const int fd = ::fcntl(physical->backing->fd(), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memcpy(to, &fd, sizeof fd);
  return CUDA_SUCCESS;
}

// `from` is the descriptor itself, which stays the caller's.
CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* from,
                                                CUmemAllocationHandleType type) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(from));
  auto backing = Backing::adopt(UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)));
  if (!backing) return CUDA_ERROR_INVALID_VALUE;
  const CUdevice device = driver.visible(backing->device());
  if (device < 0) return CUDA_ERROR_INVALID_DEVICE;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = type;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  *handle = driver.memory.keep({.backing = std::move(backing), .properties = properties});
  return CUDA_SUCCESS;
}

// --- dmabuf ----------------------------------------------------------------------------------

CUresult CUDAAPI cuMemGetHandleForAddressRange(void* handle, CUdeviceptr address, size_t size,
                                               CUmemRangeHandleType type,
                                               unsigned long long flags) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (!handle || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags != 0 || address % page != 0 ||
      size % page != 0 || size == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto mapping = driver.memory.find(address);
  const bool fit = mapping && (mapping->kind == Kind::device || mapping->kind == Kind::vmm);
  if (!fit || !mapping->accessible() ||
      size > (mapping->size + page - 1) / page * page - (address - mapping->base)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!mapping->mappable()) return CUDA_ERROR_NOT_SUPPORTED;
  // A dmabuf begins at the range. The memfd is opened anew, because each opening has a position,
  // which stands for the start of the range.
  const std::string file = "/proc/self/fd/" + std::to_string(mapping->backing->fd());
  const int fd = ::open(file.c_str(), O_RDWR);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  ::lseek(fd, static_cast<off_t>(mapping->offset + (address - mapping->base)), SEEK_SET);
  std::memcpy(handle, &fd, sizeof fd);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target,
                                            CUflushGPUDirectRDMAWritesScope scope) {
  Driver& driver = Driver::instance();
  Context* context = nullptr;
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  if (target != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX ||
      (scope != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER &&
       scope != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (auto* const flush = driver.on_flush.load()) flush();
  return CUDA_SUCCESS;
}
