#include "doubles/cuda_driver.hpp"

#include <dlfcn.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda/gpu.hpp"
#include "support.hpp"

namespace kvxfer::test {
namespace {

constexpr const char* kHandleVariable = "KVXFER_TEST_IPC_HANDLE";

const char* chosen() { return std::getenv("KVXFER_TEST_CUDA"); }

void* load(const char* path) {
  void* const loaded = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  REQUIRE_MESSAGE(loaded, ::dlerror());
  return loaded;
}

void* library() {
  static void* const loaded = load(chosen() ? chosen() : KVXFER_CUDA_DOUBLE);
  return loaded;
}

std::optional<std::size_t> live() {
  if (chosen()) return std::nullopt;
  return DOUBLE(live)();
}

}  // namespace

void* CudaDriver::find(const char* name) {
  using GetProcAddress =
      CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
  static const auto get =
      reinterpret_cast<GetProcAddress>(::dlsym(library(), "cuGetProcAddress_v2"));
  REQUIRE((get != nullptr));
  void* function = nullptr;
  CUdriverProcAddressQueryResult status{};
  // Without a suffix, as cuda.h names them; CUDA 13 has other calls of the same name.
  const int version = std::string_view(name) == "cuMemcpyBatchAsync" ? 13000 : 12000;
  const CUresult found = get(name, &function, version, 0, &status);
  REQUIRE_MESSAGE(found == CUDA_SUCCESS, name);
  return function;
}

void* CudaDriver::find_in_double(const char* name) {
  void* const found = ::dlsym(load(KVXFER_CUDA_DOUBLE), name);
  REQUIRE_MESSAGE(found, name);
  return found;
}

CudaDriver::CudaDriver() {
  cuda::Gpu::end_unused();  // GPUs of a case that could not end them
  REQUIRE(CU(Init)(0) == CUDA_SUCCESS);
  REQUIRE(CU(DevicePrimaryCtxRetain)(&context_, 0) == CUDA_SUCCESS);
  REQUIRE(CU(CtxPushCurrent)(context_) == CUDA_SUCCESS);
  live_ = live();
}

// Waits, as threads of the engine free its memory.
void CudaDriver::await_all_freed() const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (true) {
    cuda::Gpu::end_unused();
    if (live() == live_ || std::chrono::steady_clock::now() > deadline) return;
    std::this_thread::yield();
  }
}

CudaDriver::~CudaDriver() {
  // A context that has failed frees what it still had.
  cuda::Gpu::end_unused();
  if (CU(CtxSynchronize)() == CUDA_SUCCESS) {
    await_all_freed();
    CHECK(live().value_or(0) == live_.value_or(0));
  }
  if (!chosen()) CHECK(DOUBLE(by_engines)() == 0);
  CU(CtxPopCurrent)(nullptr);
  CU(DevicePrimaryCtxRelease)(0);
}

CUdeviceptr allocate(std::size_t size) {
  CUdeviceptr address = 0;
  REQUIRE(CU(MemAlloc)(&address, size) == CUDA_SUCCESS);
  return address;
}

CUstream stream(unsigned int flags) {
  CUstream made = nullptr;
  REQUIRE(CU(StreamCreate)(&made, flags) == CUDA_SUCCESS);
  return made;
}

void fill(CUdeviceptr address, int value, std::size_t size) {
  const std::vector<std::byte> bytes(size, static_cast<std::byte>(value));
  REQUIRE(CU(MemcpyHtoD)(address, bytes.data(), size) == CUDA_SUCCESS);
}

int first_byte(CUdeviceptr address) {
  unsigned char byte = 0;
  REQUIRE(CU(MemcpyDtoH)(&byte, address, 1) == CUDA_SUCCESS);
  return byte;
}

NewKernel::NewKernel() {
  REQUIRE(CU(ModuleLoadData)(&module_, cuda::kPtx) == CUDA_SUCCESS);
  REQUIRE(CU(ModuleGetFunction)(&function_, module_, cuda::kCopyKernel) == CUDA_SUCCESS);
}

CUresult NewKernel::launch(CUstream on) {
  CUdeviceptr address = entry_.address(0);
  void* parameter = &address;
  return CU(LaunchKernel)(function_, 1, 1, 1, cuda::kCopyThreads, 1, 1, 0, on, &parameter, nullptr);
}

HostWords::HostWords() {
  void* at = nullptr;
  REQUIRE(CU(MemHostAlloc)(&at, 4096, CU_MEMHOSTALLOC_DEVICEMAP) == CUDA_SUCCESS);
  words_ = static_cast<std::uint64_t*>(at);
  std::memset(at, 0, 4096);
}

Gate::Gate(CUstream on) {
  REQUIRE(CU(StreamWaitValue64)(on, words_.address(0), 1, CU_STREAM_WAIT_VALUE_GEQ) ==
          CUDA_SUCCESS);
}

int run_with_handle(const std::string& test_case, const CUipcMemHandle& handle,
                    const std::string& visible_devices) {
  std::string numbers;
  for (const char byte : handle.reserved) numbers += std::to_string(byte) + " ";
  ::setenv(kHandleVariable, numbers.c_str(), 1);
  ::setenv("CUDA_VISIBLE_DEVICES", visible_devices.c_str(), 1);
  const pid_t child = start_case(test_case);
  ::unsetenv(kHandleVariable);
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return status;
}

CUipcMemHandle handle_from_parent() {
  const char* const given = std::getenv(kHandleVariable);
  REQUIRE(given);
  std::istringstream numbers(given);
  CUipcMemHandle handle{};
  for (char& byte : handle.reserved) {
    int value = 0;
    numbers >> value;
    byte = static_cast<char>(value);
  }
  return handle;
}

}  // namespace kvxfer::test
