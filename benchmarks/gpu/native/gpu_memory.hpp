// The driver's calls that the benchmark makes beside the engine's, and the pools of both processes.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/gpus.hpp"
#include "kvxfer/engine.hpp"
#include "memory_region.hpp"
#include "pages.hpp"

namespace kvxfer::gpu_bench {

[[noreturn]] inline void give_up(const std::string& why) {
  std::fprintf(stderr, "bench-gpu: %s\n", why.c_str());
  std::exit(1);
}

template <class T>
T good(Result<T> result) {
  if (!result) give_up(result.error().text);
  return std::move(*result);
}
inline void good(const Result<void>& result) {
  if (!result) give_up(result.error().text);
}
inline void good(CUresult status, const char* call) {
  if (status != CUDA_SUCCESS) give_up(std::string(call) + " failed: " + std::to_string(status));
}

// Returns a call of cuda.h, in the form that its driver has under this name.
template <class Call>
Call find(const char* name) {
  static void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW);
  void* const found = driver ? ::dlsym(driver, name) : nullptr;
  if (!found) give_up(std::string("no ") + name + " in libcuda.so.1; a CUDA driver is needed");
  return reinterpret_cast<Call>(found);
}
#define KVXFER_CUDA(call, suffix) kvxfer::gpu_bench::find<decltype(&call)>(#call suffix)

// Makes the primary context of GPU 0 current on the calling thread.
inline void use_gpu() {
  CUcontext context = nullptr;
  good(KVXFER_CUDA(cuInit, "")(0), "cuInit");
  good(KVXFER_CUDA(cuDevicePrimaryCtxRetain, "")(&context, 0), "cuDevicePrimaryCtxRetain");
  good(KVXFER_CUDA(cuCtxSetCurrent, "")(context), "cuCtxSetCurrent");
}

// Allocates a registered pool of kPoolBytes.
inline RegionPtr pool(TransferEngine& engine, bool on_gpu) {
  return good(on_gpu ? engine.allocate_on_gpu(0, kPoolBytes) : engine.allocate(kPoolBytes));
}

inline void put(const RegionPtr& region, const std::vector<std::uint64_t>& words) {
  if (region->host()) {
    std::memcpy(region->host(), words.data(), kPoolBytes);
  } else {
    good(KVXFER_CUDA(cuMemcpyHtoD, "_v2")(region->address(), words.data(), kPoolBytes),
         "cuMemcpyHtoD");
  }
}

inline std::vector<std::uint64_t> get(const RegionPtr& region) {
  std::vector<std::uint64_t> words(kPoolBytes / sizeof(std::uint64_t));
  if (region->host()) {
    std::memcpy(words.data(), region->host(), kPoolBytes);
  } else {
    good(KVXFER_CUDA(cuMemcpyDtoH, "_v2")(words.data(), region->address(), kPoolBytes),
         "cuMemcpyDtoH");
  }
  return words;
}

}  // namespace kvxfer::gpu_bench
