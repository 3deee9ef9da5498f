// The calls of a CUDA driver, found as the engine finds them, by dlopen and cuGetProcAddress: of
// the driver that KVXFER_TEST_CUDA names, or without one of the double (cuda_double.hpp).
#pragma once

#include <cuda.h>
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "cuda_double.hpp"

namespace kvxfer::test {

class CudaDriver {
 public:
  // Makes device 0's primary context current on the calling thread until this object ends. Checks
  // then that all allocations since were freed, and that no engine's thread had to wait.
  CudaDriver();
  ~CudaDriver();
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  // Finds a call of this process' driver; fails the test if the driver does not have it.
  static void* find(const char* name);
  // Finds a function that only the double has.
  static void* find_in_double(const char* name);
  CUcontext context() const { return context_; }

 private:
  void await_all_freed() const;

  CUcontext context_ = nullptr;
  std::optional<std::size_t> live_;
};

// CU(MemAlloc)(arguments…): the driver's call of cuda.h.
#define CU(name) reinterpret_cast<decltype(&cu##name)>(kvxfer::test::CudaDriver::find("cu" #name))
#define DOUBLE(name)                               \
  reinterpret_cast<decltype(&cuda_double_##name)>( \
      kvxfer::test::CudaDriver::find_in_double("cuda_double_" #name))

inline constexpr std::size_t kBytes = 4096;
inline constexpr std::size_t kBlock = std::size_t{2} << 20;  // cuMemCreate allocates multiples

CUdeviceptr allocate(std::size_t size);
CUstream stream(unsigned int flags = CU_STREAM_NON_BLOCKING);
void fill(CUdeviceptr address, int value, std::size_t size = kBytes);
int first_byte(CUdeviceptr address);

// Memory that both the processor and the device can access.
class HostWords {
 public:
  HostWords();
  ~HostWords() { CU(MemFreeHost)(words_); }
  HostWords(const HostWords&) = delete;
  HostWords& operator=(const HostWords&) = delete;

  std::atomic_ref<std::uint64_t> operator[](std::size_t i) {
    return std::atomic_ref<std::uint64_t>(words_[i]);
  }
  CUdeviceptr address(std::size_t i) { return reinterpret_cast<CUdeviceptr>(words_ + i); }

 private:
  std::uint64_t* words_ = nullptr;
};

// A kernel that was never run: its first launch waits for all streams of the context.
class NewKernel {
 public:
  NewKernel();
  ~NewKernel() { CU(ModuleUnload)(module_); }
  NewKernel(const NewKernel&) = delete;
  NewKernel& operator=(const NewKernel&) = delete;
  CUresult launch(CUstream on);

 private:
  HostWords entry_;  // the kernel is given no bytes of it
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
};

// A gate on a stream: nothing after it runs before open().
class Gate {
 public:
  explicit Gate(CUstream on);
  void open() { words_[0].store(1); }

 private:
  HostWords words_;
};

// Runs a case of this program in another process, which has the handle and sees these devices.
// Returns its exit status, 0 if it succeeded.
int run_with_handle(const std::string& test_case, const CUipcMemHandle& handle,
                    const std::string& visible_devices = "0,1");
CUipcMemHandle handle_from_parent();

}  // namespace kvxfer::test
