// The calls of a CUDA driver, found as the engine finds them: by dlopen and cuGetProcAddress. Where
// KVXFER_TEST_CUDA names a driver it is that one, else the double (cuda_double.hpp).
#pragma once

#include <cuda.h>
#include <doctest/doctest.h>

#include "cuda_double.hpp"

namespace kvxfer::test {

class CudaDriver {
 public:
  // With device 0's primary context, which is current on the calling thread until this ends.
  CudaDriver();
  ~CudaDriver();
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  // Of this process' driver; fails the test where it has none of that name.
  static void* find(const char* name);
  CUcontext context() const { return context_; }

 private:
  CUcontext context_ = nullptr;
};

// CU(MemAlloc)(arguments…): the driver's call of cuda.h.
#define CU(name) reinterpret_cast<decltype(&cu##name)>(kvxfer::test::CudaDriver::find("cu" #name))

}  // namespace kvxfer::test
