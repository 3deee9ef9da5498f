// Of cuda.h, which is not there to build with: what the engine uses of the driver's interface.
// Where cuda.h is there, tests/test_device_memory.cpp compares.
#pragma once

namespace kvxfer::cuda {

inline constexpr const char* kDriver = "libcuda.so.1";

// CUpointer_attribute, CUmemorytype
inline constexpr int kMemoryType = 2;
inline constexpr int kIsManaged = 8;
inline constexpr int kDeviceOrdinal = 9;
inline constexpr unsigned kOnDevice = 2;

// CUresult cuPointerGetAttributes(unsigned, CUpointer_attribute*, void**, CUdeviceptr)
using PointerGetAttributes = int (*)(unsigned count, int* attributes, void** data,
                                     unsigned long long address);

}  // namespace kvxfer::cuda
