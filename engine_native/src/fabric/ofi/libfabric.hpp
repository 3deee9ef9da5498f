// libfabric, loaded at run time: one build runs with and without it. Only these functions are
// symbols; all others are inline calls through the objects that they return.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sys/types.h>

#include <cassert>
#include <cstdint>
#include <memory>
#include <string>

#include "kvxfer/error.hpp"

namespace kvxfer::ofi {

struct Libfabric {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_version) version;
  decltype(&::fi_strerror) strerror;

  // Loads the file that KVXFER_LIBFABRIC names, or else AWS's, or else the system's. Never unloads
  // it.
  static Result<Libfabric> load();

  std::string version_text() const;
  // Returns an error of what failed, with libfabric's name of `error`, the negative number that it
  // returned.
  Error failed(std::string_view what, ssize_t error) const;
};

// Closes an object of libfabric, after all objects that were opened from it.
struct FidCloser {
  template <class Fid>
  void operator()(Fid* fid) const {
    [[maybe_unused]] const int closed = ::fi_close(&fid->fid);
    assert(closed == 0);
  }
};
template <class Fid>
using UniqueFid = std::unique_ptr<Fid, FidCloser>;

struct InfoFreer {
  decltype(&::fi_freeinfo) free = nullptr;
  void operator()(fi_info* info) const { free(info); }
};
using InfoPtr = std::unique_ptr<fi_info, InfoFreer>;

// The version of the interface that we ask for, the first with efa-direct. Structures that newer
// libraries have enlarged are passed with room at their end.
inline constexpr std::uint32_t kInterface = FI_VERSION(2, 1);

struct ErrorEntry : fi_cq_err_entry {
  std::uint64_t added_later[8];
};
struct MemoryAttributes : fi_mr_attr {
  std::uint64_t added_later[8];
};

// Memory that a file of a GPU's driver stands for (fi_mr_dmabuf, which headers before 1.20 lack).
// Remote writers see it begin at `base_address` + `offset`. In fi_mr_attr a pointer to it takes the
// place of mr_iov.
struct Dmabuf {
  int fd;
  std::uint64_t offset;
  std::size_t size;
  void* base_address;
};
inline constexpr std::uint64_t kDmabuf = std::uint64_t{1} << 40;  // FI_MR_DMABUF
inline constexpr std::uint32_t kDmabufSince = FI_VERSION(1, 20);
inline constexpr int kCudaCallsPermitted = 10;  // FI_OPT_CUDA_API_PERMITTED

}  // namespace kvxfer::ofi
