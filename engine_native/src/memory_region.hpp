// Registered memory, from which this engine sends and into which peers may write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "cuda/driver.hpp"
#include "fabric/nic/nic_registration.hpp"
#include "kvxfer/types.hpp"
#include "shared_memory.hpp"
#include "thread_owner.hpp"

namespace kvxfer::cuda {
class Gpu;
}

namespace kvxfer {

// A memory region. Immutable once it is in a table, except for its end; shared by its handle, the
// table and the operations that read it.
class MemoryRegion {
 public:
  // Allocates shared memory.
  static Result<std::shared_ptr<MemoryRegion>> allocate(EngineId engine, std::size_t bytes);
  // Allocates memory of the GPU, in the context that the engine uses.
  static Result<std::shared_ptr<MemoryRegion>> allocate_on(EngineId engine,
                                                           std::shared_ptr<cuda::Gpu> gpu,
                                                           std::size_t bytes);
  // Wraps memory of the caller, on `gpu` if there is one. Keeps the shared memory in which it lies.
  static Result<std::shared_ptr<MemoryRegion>> wrap(EngineId engine, void* address,
                                                    std::size_t bytes,
                                                    std::shared_ptr<cuda::Gpu> gpu = nullptr);
  // A range of another region that one peer may write, with one immediate.
  struct Grant {
    std::shared_ptr<MemoryRegion> of;
    Imm imm;
    PeerId writer;
  };
  static std::shared_ptr<MemoryRegion> grant(EngineId engine, const RegionRange& range, Imm imm,
                                             PeerId writer);
  ~MemoryRegion();
  MemoryRegion(const MemoryRegion&) = delete;
  MemoryRegion& operator=(const MemoryRegion&) = delete;

  // The first byte, for the processor; null for memory of a GPU.
  std::byte* host() const { return gpu_ ? nullptr : reinterpret_cast<std::byte*>(address_); }
  // The address of the first byte in this process.
  std::uint64_t address() const { return address_; }
  std::size_t size() const { return size_; }
  // The GPU that has the memory; null for host memory.
  const std::shared_ptr<cuda::Gpu>& gpu() const { return gpu_; }
  // CUDA's handle for other processes; no value for host memory, or if CUDA has none.
  const std::optional<cuda::IpcHandle>& ipc_handle() const { return ipc_handle_; }
  // The region's offset in the allocation that the handle stands for.
  std::uint64_t ipc_offset() const { return ipc_offset_; }
  std::uint64_t key() const { return key_; }
  // True if peers on this host can map it.
  bool shareable() const { return shared_ && shared_->sealed(); }
  // Only if it is shareable: the descriptor that peers map, and the region's offset in it.
  int memfd() const { return shared_->memfd(); }
  std::uint64_t memfd_offset() const { return address_ - shared_->address(); }
  MrDescriptor descriptor() const;
  const std::optional<Grant>& granted() const { return grant_; }

  // Engine thread: true if operations of that engine may still read it. deregister() ends that.
  bool in_use_by(const EngineId& engine) const { return engine_ == engine && in_use(); }
  void end_use() {
    thread_.check("MemoryRegion");
    in_use_ = false;
  }

  // Sets the registrations by NIC number; null if the NIC cannot reach the memory. Must be called
  // before the region is used.
  void set_registrations(std::vector<std::shared_ptr<NicRegistration>> registrations);
  NicRegistration* registration(std::uint32_t nic) const {
    return nic < registrations_.size() ? registrations_[nic].get() : nullptr;
  }
  const std::vector<std::shared_ptr<NicRegistration>>& registrations() const {
    return registrations_;
  }
  // True if any NIC reaches it.
  bool registered() const { return registered_; }
  // See NicRegistration.
  void unshare(PeerId peer) const;
  // Closes all. Returns the first error.
  Result<void> close_registrations() const;

 private:
  MemoryRegion(EngineId engine, std::uint64_t address, std::size_t size);
  bool in_use() const {
    thread_.check("MemoryRegion");
    return in_use_;
  }
  // Makes a region whose destructor, which may unmap and unpin, runs on the thread of retire().
  static std::shared_ptr<MemoryRegion> make(EngineId engine, std::uint64_t address,
                                            std::size_t size);

  [[no_unique_address]] ThreadOwner thread_;
  EngineId engine_;
  std::uint64_t address_;
  std::size_t size_;
  std::uint64_t key_;  // random: knowing it is the permission to write
  std::shared_ptr<SharedMemory> shared_;
  std::shared_ptr<cuda::Gpu> gpu_;
  bool allocated_ = false;  // GPU memory that the region owns
  std::optional<cuda::IpcHandle> ipc_handle_;
  std::uint64_t ipc_offset_ = 0;
  bool in_use_ = true;
  std::vector<std::shared_ptr<NicRegistration>> registrations_;
  bool registered_ = false;
  std::optional<Grant> grant_;
};

using RegionPtr = std::shared_ptr<MemoryRegion>;

// The regions that peers may write into, by key. Any thread.
class RegionTable {
 public:
  void insert(const RegionPtr& region);
  // Returns false if there is no such region.
  bool erase(std::uint64_t key);
  RegionPtr find(std::uint64_t key) const;
  std::vector<RegionPtr> all() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, RegionPtr> regions_;
};

}  // namespace kvxfer
