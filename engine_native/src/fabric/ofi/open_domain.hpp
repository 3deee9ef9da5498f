// One libfabric domain, opened: what endpoints and memory registrations are made of. Shared by the
// NICs that stand for endpoints of one device. Any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "cuda/gpu.hpp"
#include "fabric/ofi/device.hpp"
#include "fabric/ofi/libfabric.hpp"
#include "thread_owner.hpp"

namespace kvxfer::ofi {

// Which endpoint an error in the event queue is about. Any thread.
class EndpointErrors {
 public:
  // `error`: what report() is to set, until remove().
  void add(const fid* endpoint, std::atomic<int>& error);
  void remove(const std::atomic<int>& error);
  // False if no endpoint has this name.
  bool report(const fid* endpoint, int error);

 private:
  std::mutex mutex_;
  std::map<const fid*, std::atomic<int>*> errors_;
};

struct OpenDomain {
  Libfabric library;
  Device device;
  UniqueFid<fid_fabric> fabric;
  UniqueFid<fid_eq> events;  // libfabric's efa aborts the process where an error finds none
  UniqueFid<fid_domain> domain;
  std::unique_ptr<EndpointErrors> endpoints = std::make_unique<EndpointErrors>();
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
  // A failure of the device itself, not of an operation or an endpoint; null: none. Endpoints are
  // told of theirs. Engine thread.
  const char* failure() const;
  // Where memory that starts there begins for a remote writer.
  std::uint64_t remote_start(std::uint64_t address) const;
};

}  // namespace kvxfer::ofi
