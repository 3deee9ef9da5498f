#include "cuda/device_memory.hpp"

#include <dlfcn.h>

#include <array>
#include <cstdint>

#include "cuda/driver_types.hpp"

namespace kvxfer::cuda {
namespace {

// Null where the process has no driver, now. It may load one later.
PointerGetAttributes pointer_get_attributes() {
  void* const driver = ::dlopen(kDriver, RTLD_NOW | RTLD_NOLOAD);
  if (!driver) return nullptr;
  void* const found = ::dlsym(driver, "cuPointerGetAttributes");
  ::dlclose(driver);  // the process keeps it loaded
  return reinterpret_cast<PointerGetAttributes>(found);
}

}  // namespace

std::optional<int> device_at(const void* address) {
  const PointerGetAttributes ask = pointer_get_attributes();
  if (!ask) return std::nullopt;
  std::uint32_t type = 0;
  std::uint32_t managed = 0;
  int device = 0;
  std::array<int, 3> wanted{kMemoryType, kIsManaged, kDeviceOrdinal};
  std::array<void*, 3> answers{&type, &managed, &device};
  // Needs no context. Without cuInit() it fails, and there is no device memory either.
  const int result = ask(static_cast<unsigned>(wanted.size()), wanted.data(), answers.data(),
                         reinterpret_cast<std::uintptr_t>(address));
  if (result != 0 || type != kOnDevice || managed != 0) return std::nullopt;
  return device;
}

}  // namespace kvxfer::cuda
