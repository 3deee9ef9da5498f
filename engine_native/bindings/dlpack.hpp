// A region as a DLPack tensor: one dimension of bytes, shared, not copied.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "cuda/gpu.hpp"
#include "memory_region.hpp"

namespace kvxfer {

inline constexpr int kDlpackCpu = 1;
inline constexpr int kDlpackCuda = 2;

// The layout of DLPack's unversioned DLManagedTensor (dlpack.h, ABI of versions 0.2 to 1.x).
struct DlpackTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t type_code;  // 1: unsigned integer
  std::uint8_t type_bits;
  std::uint16_t type_lanes;
  std::int64_t* shape;
  std::int64_t* strides;  // null: contiguous
  std::uint64_t byte_offset;
};

struct DlpackManagedTensor {
  DlpackTensor tensor;
  void* context;
  void (*deleter)(DlpackManagedTensor*);
};

// Keeps the region alive for as long as the consumer holds the tensor.
struct DlpackRegion {
  DlpackManagedTensor managed{};
  std::int64_t shape = 0;
  RegionPtr region;
};

inline pybind11::capsule to_dlpack(const RegionPtr& region) {
  auto owner = std::make_unique<DlpackRegion>();
  owner->region = region;
  owner->shape = static_cast<std::int64_t>(region->size());
  const auto& gpu = region->gpu();
  owner->managed = {.tensor = {.data = reinterpret_cast<void*>(region->address()),
                               .device_type = gpu ? kDlpackCuda : kDlpackCpu,
                               .device_id = gpu ? gpu->device() : 0,
                               .ndim = 1,
                               .type_code = 1,
                               .type_bits = 8,
                               .type_lanes = 1,
                               .shape = &owner->shape,
                               .strides = nullptr,
                               .byte_offset = 0},
                    .context = owner.get(),
                    .deleter = [](DlpackManagedTensor* managed) {
                      delete static_cast<DlpackRegion*>(managed->context);
                    }};
  // A consumer renames the capsule and calls the deleter itself; an unused one is ours to free.
  PyObject* capsule = PyCapsule_New(&owner->managed, "dltensor", [](PyObject* unused) {
    if (!PyCapsule_IsValid(unused, "dltensor")) return;
    auto* managed = static_cast<DlpackManagedTensor*>(PyCapsule_GetPointer(unused, "dltensor"));
    managed->deleter(managed);
  });
  if (!capsule) throw pybind11::error_already_set();
  owner.release();
  return pybind11::reinterpret_steal<pybind11::capsule>(capsule);
}

}  // namespace kvxfer
