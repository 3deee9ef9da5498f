// Memory that GPUs of several processes reach.
#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "cuda/gpu.hpp"
#include "memory_region.hpp"

namespace kvxfer::cuda {

// --- memory for other processes --------------------------------------------------------------

std::optional<IpcHandle> Gpu::handle_of(Address address) const {
  const Current current(*driver_, context_);
  IpcHandle handle;
  if (driver_->ipc_get_mem_handle(&handle, address) != kSuccess) return std::nullopt;
  return handle;
}

Result<FileParts> Gpu::files_of(Address address, std::size_t bytes) const {
  const Current current(*driver_, context_);
  if (auto good = check(current); !good) return good.error();
  FileParts files;
  for (Address at = address; at < address + bytes;) {
    if (files.parts.size() == FileParts::kMost) {
      return Error{Errc::fabric_unavailable,
                   "it lies in more than " + std::to_string(FileParts::kMost) + " allocations"};
    }
    AllocationHandle handle = 0;
    if (driver_->mem_retain_allocation_handle(&handle, reinterpret_cast<void*>(at)) != kSuccess) {
      return Error{Errc::fabric_unavailable,
                   "CUDA has no file of it, which only memory of cuMemCreate can have"};
    }
    int fd = -1;
    const Status exported = driver_->mem_export_to_shareable_handle(&fd, handle, kPosixFile, 0);
    driver_->mem_release(handle);
    if (exported != kSuccess) {
      return Error{Errc::fabric_unavailable,
                   "CUDA has no file of it (" + driver_->name_of(exported) +
                       "); cuMemCreate has to ask for one by requestedHandleTypes"};
    }
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    UniqueFd file(fd);
    const auto range = range_of(at);
    if (!range) return Error{Errc::gpu_lost, label_ + ": cuMemGetAddressRange failed"};
    if (files.parts.empty()) files.offset = address - range->start;
    files.parts.push_back({.file = std::move(file), .size = range->size});
    at = range->start + range->size;
  }
  return files;
}

Result<FileParts> Gpu::file_with(std::span<const std::byte> bytes) {
  FileParts files;
  {
    const Current current(*driver_, context_);
    if (auto good = check(current); !good) return good.error();
    const AllocationProperties wanted{.type = kPinned,
                                      .handle_types = kPosixFile,
                                      .location_type = kLocationDevice,
                                      .location = device_};
    std::size_t granule = 0;
    if (auto good = check(driver_->mem_get_allocation_granularity(&granule, &wanted, kLeast),
                          "cuMemGetAllocationGranularity");
        !good) {
      return good.error();
    }
    const std::size_t size = (bytes.size() + granule - 1) / granule * granule;
    AllocationHandle handle = 0;
    if (auto good = check(driver_->mem_create(&handle, size, &wanted, 0), "cuMemCreate"); !good) {
      return good.error();
    }
    int fd = -1;
    const Status exported = driver_->mem_export_to_shareable_handle(&fd, handle, kPosixFile, 0);
    driver_->mem_release(handle);  // the file keeps the memory
    if (auto good = check(exported, "cuMemExportToShareableHandle"); !good) return good.error();
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    files.parts.push_back({.file = UniqueFd(fd), .size = size});
  }
  const auto mapped = import(files);
  if (!mapped) return mapped.error();
  if (auto written = write((*mapped)->base(), bytes); !written) return written.error();
  return files;
}

// --- memory of other processes ---------------------------------------------------------------

Result<std::unique_ptr<ImportedMemory>> Gpu::import(const IpcHandle& handle) {
  const Current current(*driver_, context_);
  if (auto good = check(current); !good) return good.error();
  Address base = 0;
  if (auto good =
          check(driver_->ipc_open_mem_handle(&base, handle, kLazyPeerAccess), "cuIpcOpenMemHandle");
      !good) {
    return good.error();
  }
  return std::make_unique<ImportedMemory>(shared_from_this(), base, 0);
}

Result<std::unique_ptr<ImportedMemory>> Gpu::import(const FileParts& files) {
  std::size_t total = 0;
  for (const auto& part : files.parts) total += part.size;
  const Current current(*driver_, context_);
  if (auto good = check(current); !good) return good.error();
  Address base = 0;
  if (auto good = check(driver_->mem_address_reserve(&base, total, 0, 0, 0), "cuMemAddressReserve");
      !good) {
    return good.error();
  }
  Address at = base;
  const auto map = [&](const FileParts::Part& part) -> Result<void> {
    AllocationHandle handle = 0;
    void* const file = reinterpret_cast<void*>(static_cast<std::intptr_t>(part.file.get()));
    if (auto good = check(driver_->mem_import_from_shareable_handle(&handle, file, kPosixFile),
                          "cuMemImportFromShareableHandle");
        !good) {
      return good;
    }
    const Status mapped = driver_->mem_map(at, part.size, 0, handle, 0);
    driver_->mem_release(handle);  // the mapping keeps the memory
    if (mapped == kSuccess) at += part.size;
    return check(mapped, "cuMemMap");
  };
  Result<void> all;
  for (const auto& part : files.parts) {
    if (all) all = map(part);
  }
  const MemAccess access{
      .location_type = kLocationDevice, .location = device_, .flags = kReadWrite};
  if (all) all = check(driver_->mem_set_access(base, total, &access, 1), "cuMemSetAccess");
  if (all) return std::make_unique<ImportedMemory>(shared_from_this(), base, total);
  if (at > base) driver_->mem_unmap(base, at - base);
  driver_->mem_address_free(base, total);
  return all.error();
}

ImportedMemory::~ImportedMemory() { gpu_->close_imported(base_, mapped_); }

bool ImportedMemory::holds(std::uint64_t offset, std::uint64_t bytes) const {
  if (mapped_ > 0) return offset <= mapped_ && bytes <= mapped_ - offset;
  const auto range = gpu_->range_of(base_);
  return range && offset <= range->size && bytes <= range->size - offset;
}

void Gpu::close_imported(Address base, std::size_t mapped) const {
  const Current current(*driver_, context_);
  if (mapped == 0) {
    driver_->ipc_close_mem_handle(base);
  } else {
    driver_->mem_unmap(base, mapped);
    driver_->mem_address_free(base, mapped);
  }
}

Result<std::vector<std::byte>> Gpu::read_by_kernel(Address from, std::uint32_t bytes) const {
  const std::size_t size = bytes + sizeof(DeviceCopy);
  const auto memory = MemoryRegion::allocate({}, size);
  if (!memory) return memory.error();
  std::byte* const into = (*memory)->host();
  const Current current(*driver_, context_);
  if (auto good = check(current); !good) return good.error();
  if (auto good = check(driver_->mem_host_register(into, size, kPortable), "cuMemHostRegister");
      !good) {
    return good.error();
  }
  const auto* entry = new (into + bytes) DeviceCopy{from, (*memory)->address(), bytes};
  void* parameter = static_cast<void*>(&entry);
  const auto copied = copy(
      [&](StreamHandle stream) {
        return driver_->launch_kernel(copy_kernel_, 1, rows_of(bytes), 1, kCopyThreads, 1, 1, 0,
                                      stream, &parameter, nullptr);
      },
      "cuLaunchKernel");
  driver_->mem_host_unregister(into);
  if (!copied) return copied.error();
  return std::vector(into, into + bytes);
}

}  // namespace kvxfer::cuda
