#include "cuda_driver.hpp"

#include <dlfcn.h>

#include <cstdlib>

namespace kvxfer::test {
namespace {

void* library() {
  static void* const loaded = [] {
    const char* const chosen = std::getenv("KVXFER_TEST_CUDA");
    return ::dlopen(chosen ? chosen : KVXFER_CUDA_DOUBLE, RTLD_NOW | RTLD_LOCAL);
  }();
  REQUIRE_MESSAGE(loaded, ::dlerror());
  return loaded;
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
  const CUresult found = get(name, &function, CUDA_VERSION, 0, &status);
  REQUIRE_MESSAGE(found == CUDA_SUCCESS, name);
  return function;
}

CudaDriver::CudaDriver() {
  REQUIRE(CU(Init)(0) == CUDA_SUCCESS);
  REQUIRE(CU(DevicePrimaryCtxRetain)(&context_, 0) == CUDA_SUCCESS);
  REQUIRE(CU(CtxPushCurrent)(context_) == CUDA_SUCCESS);
}

CudaDriver::~CudaDriver() {
  CU(CtxPopCurrent)(nullptr);
  CU(DevicePrimaryCtxRelease)(0);
}

}  // namespace kvxfer::test
