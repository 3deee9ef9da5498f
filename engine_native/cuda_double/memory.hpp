// The memory of the double: the bytes behind each address, and the access that is allowed.
//
// Device memory is a memfd that is mapped twice. The address that callers see is PROT_NONE for
// ever, so the processor faults when it touches it; copies and kernels of the double use the other
// mapping. A freed address is given out again, as by a driver: an address that a caller has kept
// then means other memory, with another CU_POINTER_ATTRIBUTE_BUFFER_ID.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fd.hpp"
#include "stream.hpp"

namespace kvxfer::cuda_double {

enum class Kind : std::uint8_t {
  device,      // cuMemAlloc
  vmm,         // cuMemCreate and cuMemMap
  pool,        // cuMemAllocAsync
  imported,    // cuIpcOpenMemHandle
  managed,     // cuMemAllocManaged
  host,        // cuMemHostAlloc
  registered,  // cuMemHostRegister
};

// Physical memory; shared by processes through its descriptor.
class Backing {
 public:
  // Makes memory of a device, which is given by its number on the machine.
  static std::shared_ptr<Backing> make(std::size_t size, int device);
  static std::shared_ptr<Backing> adopt(UniqueFd memfd);  // null if it is not memory of a device
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  int fd() const { return memfd_.get(); }
  std::byte* bytes() const { return bytes_; }
  std::size_t size() const { return size_; }
  int device() const { return device_; }
  // Fills the memory with bytes that show a use after its end.
  void poison();

 private:
  Backing(UniqueFd memfd, std::byte* bytes, std::size_t size, int device)
      : memfd_(std::move(memfd)), bytes_(bytes), size_(size), device_(device) {}

  UniqueFd memfd_;
  std::byte* bytes_;
  std::size_t size_;
  int device_;
};

// Memory that cuMemCreate made, or that was imported.
struct Physical {
  std::shared_ptr<Backing> backing;
  CUmemAllocationProp properties{};
};

struct Mapping {
  CUdeviceptr base = 0;
  std::size_t size = 0;
  Kind kind = Kind::device;
  CUcontext context = nullptr;
  CUdevice device = 0;
  std::shared_ptr<Backing> backing;  // null if the processor reaches the memory
  std::size_t offset = 0;            // offset in the backing
  std::optional<Physical> physical;  // vmm
  std::set<CUdevice> access;         // vmm: devices that cuMemSetAccess() has permitted
  PointPtr allocated;                // pool: point of the allocation in its stream
  std::uint64_t buffer_id = 0;
  bool sync_memops = false;

  bool on_host() const { return kind == Kind::host || kind == Kind::registered; }
  bool accessible() const { return kind != Kind::vmm || !access.empty(); }
  // True if the memory may be registered with a NIC.
  bool mappable() const {
    return !physical || physical->properties.allocFlags.gpuDirectRDMACapable != 0;
  }
  std::byte* alias() const {
    return backing ? backing->bytes() + offset : reinterpret_cast<std::byte*>(base);
  }
};

// The memory of one process. Any thread.
class Memory {
 public:
  static constexpr std::size_t kGranularity = std::size_t{2} << 20;
  static constexpr std::size_t whole(std::size_t size) {
    return (size + kGranularity - 1) / kGranularity * kGranularity;
  }

  // --- addresses
  CUresult add(Mapping mapping);
  // Removes and returns the mapping that begins at `base` and is of this kind; null if there is
  // none.
  std::shared_ptr<Mapping> remove(CUdeviceptr base, Kind kind);
  // Ends all mappings of a context.
  void drop(CUcontext context);
  // Returns the mapping that holds the address; null if none does.
  std::shared_ptr<Mapping> find(CUdeviceptr address) const;
  // The real places of bytes, in order; empty if a part of them is not mapped, or access is not
  // permitted. Plain host memory is `pageable`, in one piece.
  struct Pieces {
    std::vector<std::span<std::byte>> bytes;
    std::vector<std::shared_ptr<Mapping>> of;
    bool pageable = false;
    bool ready() const;
  };
  Pieces resolve(CUdeviceptr address, std::size_t size, bool pageable_allowed) const;

  // Reserves whole granules, PROT_NONE; reuses those that were given back, the newest first.
  CUdeviceptr reserve(std::size_t size);
  void give_back(CUdeviceptr address, std::size_t size);
  // Ends a mapping that was removed: nothing reaches its memory any more.
  void end(const Mapping& mapping);

  // --- cuMemCreate
  CUmemGenericAllocationHandle keep(Physical physical);
  std::shared_ptr<Physical> physical(CUmemGenericAllocationHandle handle) const;
  bool release(CUmemGenericAllocationHandle handle);
  // Adds a range of cuMemAddressReserve, into which memory may be mapped.
  void add_reservation(CUdeviceptr address, std::size_t size);
  bool remove_reservation(CUdeviceptr address, std::size_t size);
  bool reserved(CUdeviceptr address, std::size_t size) const;
  // Returns the start and the size of the reservation that holds the address; zeros if none does.
  std::pair<CUdeviceptr, std::size_t> reservation_of(CUdeviceptr address) const;

  std::size_t live() const;

 private:
  mutable std::mutex mutex_;
  std::map<CUdeviceptr, std::shared_ptr<Mapping>> mappings_;  // keyed by base
  std::multimap<std::size_t, CUdeviceptr> given_back_;        // keyed by size
  std::map<CUdeviceptr, std::size_t> reservations_;
  std::unordered_map<CUmemGenericAllocationHandle, std::shared_ptr<Physical>> physical_;
  CUmemGenericAllocationHandle last_handle_ = 0;
  std::uint64_t last_buffer_ = 0;
};

}  // namespace kvxfer::cuda_double
