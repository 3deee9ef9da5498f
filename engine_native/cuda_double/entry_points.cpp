// Lookup of the calls by name (cuGetProcAddress), and the double's additions.
#include <dlfcn.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "cuda_double.hpp"
#include "driver.hpp"

using namespace kvxfer::cuda_double;

namespace {

// Returns the oldest version that a call may be requested as. One of the calls here has changed
// since its _v2.
int oldest_version(std::string_view symbol) {
  return symbol == "cuMemcpyBatchAsync" ? 13000 : 2000;
}

}  // namespace

CUresult CUDAAPI cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t,
                                  CUdriverProcAddressQueryResult* status) {
  if (!symbol || !function) return CUDA_ERROR_INVALID_VALUE;
  *function = nullptr;
  const auto say = [status](CUdriverProcAddressQueryResult result) {
    if (status) *status = result;
    return result == CU_GET_PROC_ADDRESS_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
  };
  Dl_info self{};
  if (::dladdr(reinterpret_cast<void*>(&cuInit), &self) == 0) return CUDA_ERROR_UNKNOWN;
  void* const library = ::dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  for (const char* suffix : {"_v3", "_v2", "WithFlags", ""}) {
    *function = ::dlsym(library, (std::string(symbol) + suffix).c_str());
    if (*function) break;
  }
  if (library) ::dlclose(library);
  if (!*function) return say(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  if (version >= oldest_version(symbol)) return say(CU_GET_PROC_ADDRESS_SUCCESS);
  *function = nullptr;
  return say(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
}

// --- the double's additions ------------------------------------------------------------------

CUresult cuda_double_launch(CUstream stream, cuda_double_kernel kernel, void* arguments) {
  Driver& driver = Driver::instance();
  Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  place.await_room();
  Context& context = *place.context;
  place.enqueue([&context, kernel, arguments] {
    if (!kernel(arguments)) context.sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
  });
  return CUDA_SUCCESS;
}

void* cuda_double_alias(CUdeviceptr address, size_t size) {
  const Driver& driver = Driver::instance();
  const auto pieces = driver.memory.resolve(address, size, false);
  if (pieces.bytes.size() != 1 || !pieces.ready()) return nullptr;
  const CUcontext kernel = Stream::running();
  return !kernel || driver.reaches(kernel, *pieces.of.front()) ? pieces.bytes.front().data()
                                                               : nullptr;
}

void cuda_double_on_flush(void (*flush)(void)) { Driver::instance().on_flush = flush; }

void cuda_double_peers(bool reach) { Driver::instance().peers_reach = reach; }

void cuda_double_peers_corrupt(bool corrupt) { Driver::instance().peers_corrupt = corrupt; }

size_t cuda_double_live(void) {
  const Driver& driver = Driver::instance();
  return driver.memory.live() + driver.retained();
}

size_t cuda_double_holding(void) { return Driver::instance().holding; }

void cuda_double_attribute(CUdevice_attribute attribute, int value) {
  Driver::instance().set_attribute(attribute, value);
}

void cuda_double_same_handles(bool same) { Driver::instance().same_handles = same; }

void cuda_double_mps_fault(CUdevice device) { Driver::instance().fault(device); }

uint64_t cuda_double_waits(void) { return Driver::instance().waits; }

uint64_t cuda_double_by_engines(void) { return Driver::instance().by_engines; }
