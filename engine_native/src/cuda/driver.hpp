// CUDA's driver, loaded at run time: the engine runs without it, and the build needs no CUDA. This
// file declares the parts of cuda.h that the engine uses; if cuda.h is installed,
// tests/gpu/test_gpu_memory.cpp compares them. Any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "kvxfer/error.hpp"

namespace kvxfer::cuda {

using Status = int;  // CUresult
inline constexpr Status kSuccess = 0;
inline constexpr Status kInvalidValue = 1;
inline constexpr Status kOutOfMemory = 2;
inline constexpr Status kNotInitialized = 3;
inline constexpr Status kInvalidContext = 201;
inline constexpr Status kInvalidHandle = 400;
inline constexpr Status kNotReady = 600;
inline constexpr Status kNotSupported = 801;

using Address = unsigned long long;  // CUdeviceptr
using Context = struct CUctx_st*;    // NOLINT(bugprone-reserved-identifier)
using StreamHandle = struct CUstream_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;

using AllocationHandle = unsigned long long;  // CUmemGenericAllocationHandle

// CUipcMemHandle
struct IpcHandle {
  std::array<char, 64> bytes{};
};
// CUuuid
struct Uuid {
  std::array<char, 16> bytes{};
  auto operator<=>(const Uuid&) const = default;
};
// CUmemAccessDesc
struct MemAccess {
  int location_type;
  int location;
  int flags;
};
// CUmemAllocationProp
struct AllocationProperties {
  int type;
  int handle_types;
  int location_type;
  int location;
  void* windows = nullptr;
  std::array<unsigned char, 8> flags{};
};

// CUpointer_attribute, CUmemorytype
inline constexpr int kContextOf = 1;
inline constexpr int kMemoryType = 2;
inline constexpr int kIsManaged = 8;
inline constexpr int kDeviceOrdinal = 9;
inline constexpr unsigned kOnDevice = 2;
inline constexpr int kSyncMemops = 6;
// CUdevice_attribute, and its values
inline constexpr int kHostPointers = 91;     // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
inline constexpr int kWideWords = 122;       // CAN_USE_64_BIT_STREAM_MEM_OPS
inline constexpr int kHostPageTables = 100;  // PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
inline constexpr int kRdmaFlushOptions = 117;
inline constexpr int kRdmaWritesOrdering = 118;
inline constexpr int kFlushByHost = 1;        // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
inline constexpr int kOrderedForOwner = 100;  // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
// Flags and modes
inline constexpr int kFlushContext = 0;      // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
inline constexpr int kFlushForOwner = 100;   // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
inline constexpr int kPosixFile = 1;         // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
inline constexpr int kPinned = 1;            // CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int kLeast = 0;             // CU_MEM_ALLOC_GRANULARITY_MINIMUM
inline constexpr int kLocationDevice = 1;    // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int kReadWrite = 3;         // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
inline constexpr int kDmabuf = 1;            // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
inline constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kPortable = 1;     // CU_MEMHOSTREGISTER_PORTABLE
inline constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
inline constexpr int kRelaxed = 2;              // CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr int kCapturing = 1;            // CU_STREAM_CAPTURE_STATUS_ACTIVE
inline constexpr unsigned kAtLeast = 0;         // CU_STREAM_WAIT_VALUE_GEQ

struct Driver {
  // Returns the driver that the process has loaded; null if it has none, and so no device memory.
  static std::shared_ptr<const Driver> loaded();
  // Loads the driver if necessary. Fails with fabric-unavailable.
  static Result<std::shared_ptr<const Driver>> load();

  // Returns CUDA's name, such as "CUDA_ERROR_ILLEGAL_ADDRESS".
  std::string name_of(Status status) const;

  // Calls, named as in cuda.h without the prefix, in the form of CUDA 12.0.
  Status (*init)(unsigned flags) = nullptr;
  Status (*get_error_name)(Status status, const char** name) = nullptr;
  Status (*device_get_count)(int* count) = nullptr;
  Status (*device_get_name)(char* name, int length, int device) = nullptr;
  Status (*device_get_uuid)(Uuid* uuid, int device) = nullptr;
  Status (*device_get_attribute)(int* value, int attribute, int device) = nullptr;
  Status (*device_primary_ctx_retain)(Context* context, int device) = nullptr;
  Status (*device_primary_ctx_release)(int device) = nullptr;
  Status (*ctx_push_current)(Context context) = nullptr;
  Status (*ctx_pop_current)(Context* context) = nullptr;
  Status (*thread_exchange_stream_capture_mode)(int* mode) = nullptr;
  Status (*ctx_get_stream_priority_range)(int* least, int* greatest) = nullptr;
  Status (*stream_create_with_priority)(StreamHandle* stream, unsigned flags,
                                        int priority) = nullptr;
  Status (*stream_destroy)(StreamHandle stream) = nullptr;
  Status (*stream_synchronize)(StreamHandle stream) = nullptr;
  Status (*stream_query)(StreamHandle stream) = nullptr;
  Status (*stream_is_capturing)(StreamHandle stream, int* status) = nullptr;
  Status (*stream_wait_value64)(StreamHandle stream, Address address, std::uint64_t value,
                                unsigned flags) = nullptr;
  Status (*module_load_data)(Module* module, const void* image) = nullptr;
  Status (*module_unload)(Module module) = nullptr;
  Status (*module_get_function)(Function* function, Module module, const char* name) = nullptr;
  Status (*launch_kernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, StreamHandle stream, void** parameters,
                          void** extra) = nullptr;
  Status (*mem_alloc)(Address* address, std::size_t bytes) = nullptr;
  Status (*mem_free)(Address address) = nullptr;
  Status (*memset_d8_async)(Address address, unsigned char value, std::size_t bytes,
                            StreamHandle stream) = nullptr;
  Status (*memcpy_htod_async)(Address to, const void* from, std::size_t bytes,
                              StreamHandle stream) = nullptr;
  Status (*memcpy_dtoh_async)(void* to, Address from, std::size_t bytes,
                              StreamHandle stream) = nullptr;
  Status (*mem_host_register)(void* address, std::size_t bytes, unsigned flags) = nullptr;
  Status (*mem_host_unregister)(void* address) = nullptr;
  Status (*pointer_get_attributes)(unsigned count, int* attributes, void** data,
                                   Address address) = nullptr;
  Status (*mem_get_address_range)(Address* start, std::size_t* size, Address address) = nullptr;
  Status (*pointer_set_attribute)(const void* value, int attribute, Address address) = nullptr;
  Status (*mem_get_handle_for_address_range)(void* handle, Address address, std::size_t bytes,
                                             int type, unsigned long long flags) = nullptr;
  Status (*flush_gpu_direct_rdma_writes)(int target, int scope) = nullptr;
  Status (*ipc_get_mem_handle)(IpcHandle* handle, Address address) = nullptr;
  Status (*ipc_open_mem_handle)(Address* address, IpcHandle handle, unsigned flags) = nullptr;
  Status (*ipc_close_mem_handle)(Address address) = nullptr;
  Status (*mem_get_allocation_granularity)(std::size_t* bytes, const AllocationProperties* wanted,
                                           int option) = nullptr;
  Status (*mem_create)(AllocationHandle* handle, std::size_t bytes,
                       const AllocationProperties* wanted, unsigned long long flags) = nullptr;
  Status (*mem_retain_allocation_handle)(AllocationHandle* handle, void* address) = nullptr;
  Status (*mem_release)(AllocationHandle handle) = nullptr;
  Status (*mem_export_to_shareable_handle)(void* to, AllocationHandle handle, int type,
                                           unsigned long long flags) = nullptr;
  Status (*mem_import_from_shareable_handle)(AllocationHandle* handle, void* from,
                                             int type) = nullptr;
  Status (*mem_address_reserve)(Address* address, std::size_t bytes, std::size_t alignment,
                                Address wanted, unsigned long long flags) = nullptr;
  Status (*mem_address_free)(Address address, std::size_t bytes) = nullptr;
  Status (*mem_map)(Address address, std::size_t bytes, std::size_t offset, AllocationHandle handle,
                    unsigned long long flags) = nullptr;
  Status (*mem_unmap)(Address address, std::size_t bytes) = nullptr;
  Status (*mem_set_access)(Address address, std::size_t bytes, const MemAccess* access,
                           std::size_t count) = nullptr;
};

}  // namespace kvxfer::cuda
