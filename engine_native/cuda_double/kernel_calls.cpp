// Modules and kernels. The double cannot run PTX: functions here stand for the kernels that a
// module has by name; a kernel without such a function is not found.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels.hpp"
#include "driver.hpp"

namespace kvxfer::cuda_double {
namespace {

struct Grid {
  unsigned x, y, z, threads;
};

// Returns the pieces in which a kernel of the context finds these bytes; none if the address is
// illegal.
std::vector<std::span<std::byte>> reached(CUcontext context, CUdeviceptr address,
                                          std::size_t size) {
  const Driver& driver = Driver::instance();
  const auto pieces = driver.memory.resolve(address, size, false);
  const bool all =
      pieces.ready() && std::all_of(pieces.of.begin(), pieces.of.end(), [&](const auto& mapping) {
        return driver.reaches(context, *mapping);
      });
  return all ? pieces.bytes : std::vector<std::span<std::byte>>();
}

// True if the address is in another device's memory, which reads wrong.
bool corrupt(CUcontext context, CUdeviceptr address) {
  Driver& driver = Driver::instance();
  if (!driver.peers_corrupt) return false;
  const auto mapping = driver.memory.find(address);
  const Context* const reader = driver.of(context);
  return mapping && !mapping->on_host() && reader && mapping->device != reader->device;
}

bool copy_bytes(CUcontext context, CUdeviceptr to, CUdeviceptr from, std::size_t size) {
  std::vector<std::byte> bytes;
  for (const auto& piece : reached(context, from, size)) {
    bytes.insert(bytes.end(), piece.begin(), piece.end());
  }
  if (bytes.size() != size) return false;
  if (corrupt(context, from)) std::ranges::fill(bytes, std::byte{0xff});
  std::size_t at = 0;
  for (const auto& piece : reached(context, to, size)) {
    std::memcpy(piece.data(), &bytes[at], piece.size());
    at += piece.size();
  }
  return at == size;
}

// Runs kvxfer_copy_pages, block by block; bytes that the grid leaves out are not copied.
bool copy_pages(const Grid& grid, const std::vector<std::byte>& parameters) {
  const CUcontext context = Stream::running();
  CUdeviceptr table = 0;
  std::memcpy(&table, parameters.data(), sizeof table);
  const auto copies = reached(context, table, grid.x * sizeof(cuda::DeviceCopy));
  if (copies.size() != 1 || grid.threads != cuda::kCopyThreads) return false;
  for (unsigned i = 0; i < grid.x; ++i) {
    cuda::DeviceCopy copy;
    std::memcpy(&copy, &copies[0][i * sizeof copy], sizeof copy);
    for (unsigned j = 0; j < grid.y; ++j) {
      const std::uint64_t begin = std::uint64_t{j} * cuda::kBytesPerBlock;
      if (begin >= copy.length) break;
      const std::size_t size = std::min<std::uint64_t>(copy.length - begin, cuda::kBytesPerBlock);
      if (!copy_bytes(context, copy.destination + begin, copy.source + begin, size)) return false;
    }
  }
  return true;
}

// Runs kvxfer_count, of one thread.
bool count(const Grid& grid, const std::vector<std::byte>& parameters) {
  const CUcontext context = Stream::running();
  cuda::StreamCount count;
  std::memcpy(&count, parameters.data(), sizeof count);
  const auto counter = reached(context, count.counter, sizeof(std::uint64_t));
  const auto word = reached(context, count.word, sizeof(std::uint64_t));
  if (counter.size() != 1 || word.size() != 1 || grid.x * grid.y * grid.z * grid.threads != 1) {
    return false;
  }
  const auto at = [](const auto& bytes) {
    return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(bytes.data()));
  };
  at(word[0]).store(at(counter[0]).fetch_add(count.by) + count.by, std::memory_order_release);
  return true;
}

struct Kernel {
  std::size_t parameter_bytes;
  bool (*run)(const Grid& grid, const std::vector<std::byte>& parameters);
};

const std::map<std::string, Kernel>& kernels() {
  static const std::map<std::string, Kernel> known{
      {cuda::kCopyKernel, {.parameter_bytes = sizeof(CUdeviceptr), .run = copy_pages}},
      {cuda::kCountKernel, {.parameter_bytes = sizeof(cuda::StreamCount), .run = count}}};
  return known;
}

struct LoadedModule {
  std::string image;
  CUcontext context;
};

std::mutex mutex;
std::map<CUmodule, LoadedModule> modules;
struct LoadedFunction {
  CUmodule module;
  const Kernel* kernel;
  bool launched = false;
};
std::map<CUfunction, LoadedFunction> functions;
std::uintptr_t last_handle = 0x2000;

}  // namespace
}  // namespace kvxfer::cuda_double

using namespace kvxfer::cuda_double;

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
  Context* context = nullptr;
  Driver& driver = Driver::instance();
  if (const CUresult bad = driver.current_for_unsafe(&context); bad != CUDA_SUCCESS) return bad;
  if (!module || !image) return CUDA_ERROR_INVALID_VALUE;
  const std::string text = static_cast<const char*>(image);
  if (text.find(".version") == std::string::npos || text.find(".target") == std::string::npos) {
    return CUDA_ERROR_INVALID_PTX;
  }
  const Exclusive exclusive(*context);
  const std::lock_guard lock(mutex);
  *module = reinterpret_cast<CUmodule>(++last_handle);
  modules[*module] = {.image = text, .context = context->handle};
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleUnload(CUmodule module) {
  Context* context = nullptr;
  Driver& driver = Driver::instance();
  if (const CUresult bad = driver.current_for_unsafe(&context); bad != CUDA_SUCCESS) return bad;
  const Exclusive exclusive(*context);
  const std::lock_guard lock(mutex);
  if (modules.erase(module) == 0) return CUDA_ERROR_INVALID_HANDLE;
  std::erase_if(functions, [module](const auto& each) { return each.second.module == module; });
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  const std::lock_guard lock(mutex);
  const auto found = modules.find(module);
  if (!function || !name || found == modules.end()) return CUDA_ERROR_INVALID_VALUE;
  const auto known = kernels().find(name);
  const std::string entry = ".entry " + std::string(name) + "(";
  if (known == kernels().end() || found->second.image.find(entry) == std::string::npos) {
    return CUDA_ERROR_NOT_FOUND;
  }
  *function = reinterpret_cast<CUfunction>(++last_handle);
  functions[*function] = {.module = module, .kernel = &known->second};
  return CUDA_SUCCESS;
}

// Reads the parameters at once.
CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int x, unsigned int y, unsigned int z,
                                unsigned int threads_x, unsigned int threads_y,
                                unsigned int threads_z, unsigned int, CUstream stream,
                                void** parameters, void** extra) {
  Driver& driver = Driver::instance();
  Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  const Kernel* kernel = nullptr;
  bool first = false;
  {
    const std::lock_guard lock(mutex);
    const auto found = functions.find(function);
    if (found == functions.end()) return CUDA_ERROR_INVALID_HANDLE;
    const CUcontext of = modules.at(found->second.module).context;
    if (of != place.context->handle) return CUDA_ERROR_INVALID_CONTEXT;
    kernel = found->second.kernel;
    first = !std::exchange(found->second.launched, true) && Driver::lazy();
  }
  const unsigned threads = threads_x * threads_y * threads_z;
  if (x == 0 || y == 0 || z == 0 || y > 65535 || z > 65535 || threads == 0 || threads > 1024 ||
      !parameters || extra) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (first) {
    const Exclusive loading(*place.context);
  }
  place.await_room();
  std::vector<std::byte> values(kernel->parameter_bytes);
  std::memcpy(values.data(), parameters[0], values.size());
  Context& context = *place.context;
  place.enqueue([&context, kernel, grid = Grid{x, y, z, threads}, values = std::move(values)] {
    if (!kernel->run(grid, values)) context.sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
  });
  return CUDA_SUCCESS;
}
