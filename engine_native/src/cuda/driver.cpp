#include "cuda/driver.hpp"

#include <dlfcn.h>

namespace kvxfer::cuda {
namespace {

constexpr const char* kName = "libcuda.so.1";
// Calls keep the form of this version; CUDA 13 changed some.
constexpr int kVersion = 12000;

using GetProcAddress = Status (*)(const char* symbol, void** function, int version,
                                  std::uint64_t flags, int* found);

class Finder {
 public:
  explicit Finder(void* library)
      : get_(reinterpret_cast<GetProcAddress>(::dlsym(library, "cuGetProcAddress_v2"))) {}

  template <class Call>
  Finder& operator()(const char* name, Call& call) {
    void* found = nullptr;
    int how = 0;
    complete_ = complete_ && get_ && get_(name, &found, kVersion, 0, &how) == kSuccess && found;
    call = reinterpret_cast<Call>(found);
    return *this;
  }
  bool complete() const { return complete_; }

 private:
  GetProcAddress get_;
  bool complete_ = true;
};

// Returns null if a call is missing: a driver older than CUDA 12.
std::shared_ptr<const Driver> calls_of(void* library) {
  auto driver = std::make_shared<Driver>();
  Finder find(library);
  find("cuInit", driver->init)("cuGetErrorName", driver->get_error_name);
  find("cuDeviceGetCount", driver->device_get_count)("cuDeviceGetName", driver->device_get_name);
  find("cuDeviceGetUuid", driver->device_get_uuid);
  find("cuDeviceGetAttribute", driver->device_get_attribute);
  find("cuDevicePrimaryCtxRetain", driver->device_primary_ctx_retain);
  find("cuDevicePrimaryCtxRelease", driver->device_primary_ctx_release);
  find("cuCtxPushCurrent", driver->ctx_push_current)("cuCtxPopCurrent", driver->ctx_pop_current);
  find("cuThreadExchangeStreamCaptureMode", driver->thread_exchange_stream_capture_mode);
  find("cuCtxGetStreamPriorityRange", driver->ctx_get_stream_priority_range);
  find("cuStreamCreateWithPriority", driver->stream_create_with_priority);
  find("cuStreamDestroy", driver->stream_destroy);
  find("cuStreamSynchronize", driver->stream_synchronize);
  find("cuStreamQuery", driver->stream_query);
  find("cuStreamIsCapturing", driver->stream_is_capturing);
  find("cuStreamWaitValue64", driver->stream_wait_value64);
  find("cuModuleLoadData", driver->module_load_data)("cuModuleUnload", driver->module_unload);
  find("cuModuleGetFunction", driver->module_get_function);
  find("cuLaunchKernel", driver->launch_kernel);
  find("cuMemAlloc", driver->mem_alloc)("cuMemFree", driver->mem_free);
  find("cuMemsetD8Async", driver->memset_d8_async);
  find("cuMemcpyHtoDAsync", driver->memcpy_htod_async);
  find("cuMemcpyDtoHAsync", driver->memcpy_dtoh_async);
  find("cuMemHostRegister", driver->mem_host_register);
  find("cuMemHostUnregister", driver->mem_host_unregister);
  find("cuPointerGetAttributes", driver->pointer_get_attributes);
  find("cuMemGetAddressRange", driver->mem_get_address_range);
  find("cuPointerSetAttribute", driver->pointer_set_attribute);
  find("cuMemGetHandleForAddressRange", driver->mem_get_handle_for_address_range);
  find("cuFlushGPUDirectRDMAWrites", driver->flush_gpu_direct_rdma_writes);
  find("cuIpcGetMemHandle", driver->ipc_get_mem_handle);
  find("cuIpcOpenMemHandle", driver->ipc_open_mem_handle);
  find("cuIpcCloseMemHandle", driver->ipc_close_mem_handle);
  find("cuMemGetAllocationGranularity", driver->mem_get_allocation_granularity);
  find("cuMemCreate", driver->mem_create);
  find("cuMemRetainAllocationHandle", driver->mem_retain_allocation_handle);
  find("cuMemRelease", driver->mem_release);
  find("cuMemExportToShareableHandle", driver->mem_export_to_shareable_handle);
  find("cuMemImportFromShareableHandle", driver->mem_import_from_shareable_handle);
  find("cuMemAddressReserve", driver->mem_address_reserve);
  find("cuMemAddressFree", driver->mem_address_free);
  find("cuMemMap", driver->mem_map)("cuMemUnmap", driver->mem_unmap);
  find("cuMemSetAccess", driver->mem_set_access);
  return find.complete() ? driver : nullptr;
}

}  // namespace

std::shared_ptr<const Driver> Driver::loaded() {
  void* const library = ::dlopen(kName, RTLD_NOW | RTLD_NOLOAD);
  if (!library) return nullptr;
  auto driver = calls_of(library);
  ::dlclose(library);  // the process keeps it loaded
  return driver;
}

Result<std::shared_ptr<const Driver>> Driver::load() {
  void* const library = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!library) {
    return Error{Errc::fabric_unavailable,
                 std::string(kName) + " cannot be loaded; install NVIDIA's driver on this host"};
  }
  auto driver = calls_of(library);
  if (!driver) {
    return Error{Errc::fabric_unavailable,
                 std::string(kName) +
                     " of this host is too old; a driver of CUDA 12.0 or later "
                     "(525) is needed"};
  }
  if (const Status status = driver->init(0); status != kSuccess) {
    return Error{Errc::fabric_unavailable, "CUDA does not start (" + driver->name_of(status) +
                                               "); nvidia-smi shows the GPUs of this host"};
  }
  return driver;
}

std::string Driver::name_of(Status status) const {
  const char* name = nullptr;
  if (get_error_name(status, &name) == kSuccess && name) return name;
  return "CUDA error " + std::to_string(status);
}

}  // namespace kvxfer::cuda
