// One libfabric domain, opened: what endpoints and memory registrations are made of. Shared by the
// NICs that stand for endpoints of one device. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "cuda/gpu.hpp"
#include "fabric/ofi/device.hpp"
#include "fabric/ofi/libfabric.hpp"
#include "thread_owner.hpp"

namespace kvxfer::ofi {

struct OpenDomain {
  Libfabric library;
  Device device;
  UniqueFid<fid_fabric> fabric;
  UniqueFid<fid_eq> events;  // libfabric's efa aborts the process where an error finds none
  UniqueFid<fid_domain> domain;
  bool local_keys = false;  // memory that is read needs a descriptor
  [[no_unique_address]] ThreadOwner thread;
  mutable int failed = 0;  // libfabric's number of it

  // `strict`: everything is registered, whatever the provider needs.
  static Result<std::shared_ptr<const OpenDomain>> open(const Libfabric& library, Device device,
                                                        bool strict);

  struct Memory {
    std::uint64_t address;
    std::size_t size;
    // Of a GPU's memory its number, and for MemoryWay::dmabuf the file.
    std::optional<int> gpu;
    const cuda::Gpu::Dmabuf* dmabuf = nullptr;
  };
  // `access`: FI_WRITE for memory that is read from, FI_REMOTE_WRITE for memory written into.
  Result<UniqueFid<fid_mr>> register_memory(const Memory& memory, std::uint64_t access) const;
  // A failure of the device itself, not of an operation; null: none. Engine thread.
  const char* failure() const;
  // Where memory that starts there begins for a remote writer.
  std::uint64_t remote_start(std::uint64_t address) const;
};

}  // namespace kvxfer::ofi
