// An open libfabric domain, from which endpoints and memory registrations are made. The NICs that
// stand for endpoints of one device share it. Any thread.
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

// The endpoints that errors in the event queue are about. Any thread.
class EndpointErrors {
 public:
  // Adds an endpoint, whose errors report() stores in `error`, until remove().
  void add(const fid* endpoint, std::atomic<int>& error);
  void remove(const std::atomic<int>& error);
  // Returns false if no endpoint has this fid.
  bool report(const fid* endpoint, int error);

 private:
  std::mutex mutex_;
  std::map<const fid*, std::atomic<int>*> errors_;
};

struct OpenDomain {
  Libfabric library;
  Device device;
  UniqueFid<fid_fabric> fabric;
  UniqueFid<fid_eq> events;  // without one, an error makes libfabric's efa abort the process
  UniqueFid<fid_domain> domain;
  std::unique_ptr<EndpointErrors> endpoints = std::make_unique<EndpointErrors>();
  bool local_keys = false;  // memory that is read needs a descriptor
  [[no_unique_address]] ThreadOwner thread;
  mutable int failed = 0;  // libfabric's error number of a failed device

  // `strict`: local memory has descriptors, whatever the provider needs.
  static Result<std::shared_ptr<const OpenDomain>> open(const Libfabric& library, Device device,
                                                        bool strict);

  struct Memory {
    std::uint64_t address;
    std::size_t size;
    // The number of the GPU that has the memory, and the file for MemoryWay::dmabuf.
    std::optional<int> gpu;
    const cuda::Gpu::Dmabuf* dmabuf = nullptr;
  };
  // `access`: FI_WRITE for memory that is read from, FI_REMOTE_WRITE for memory written into.
  Result<UniqueFid<fid_mr>> register_memory(const Memory& memory, std::uint64_t access) const;
  // Returns a failure of the device itself, not of an operation or an endpoint; null if there is
  // none. Endpoints are told of their failures. Engine thread.
  const char* failure() const;
  // Returns where memory that starts at `address` begins for a remote writer.
  std::uint64_t remote_start(std::uint64_t address) const;
};

}  // namespace kvxfer::ofi
