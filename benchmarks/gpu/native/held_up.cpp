#include "held_up.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

#include "cuda/kernels.hpp"
#include "gpu_memory.hpp"
#include "order.hpp"
#include "receiver.hpp"

namespace kvxfer::gpu_bench {
namespace {

constexpr std::uint64_t kKernels = 20;
constexpr std::size_t kCopied = 64 * 1024;
constexpr std::chrono::milliseconds kWaits{20};  // each wait of the stream

using Clock = std::chrono::steady_clock;
using Word = std::atomic_ref<std::uint64_t>;

// Launches kernels that nothing has launched before, each behind a wait for its number in `gate`.
void launch_new(std::uint64_t* gate, std::atomic<std::uint64_t>& launching) {
  use_gpu();
  CUstream stream = nullptr;
  good(KVXFER_CUDA(cuStreamCreate, "")(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  for (std::uint64_t number = 1; number <= kKernels; ++number) {
    CUmodule module = nullptr;
    CUfunction kernel = nullptr;
    good(KVXFER_CUDA(cuModuleLoadData, "")(&module, cuda::kPtx), "cuModuleLoadData");
    good(KVXFER_CUDA(cuStreamWaitValue64, "_v2")(stream, reinterpret_cast<CUdeviceptr>(gate),
                                                 number, CU_STREAM_WAIT_VALUE_GEQ),
         "cuStreamWaitValue64");
    launching = number;
    good(KVXFER_CUDA(cuModuleGetFunction, "")(&kernel, module, cuda::kCopyKernel),
         "cuModuleGetFunction");
    // The entry of a copy without bytes, which lies behind the gate.
    auto entry = reinterpret_cast<CUdeviceptr>(gate + 8);
    void* parameter = &entry;
    good(KVXFER_CUDA(cuLaunchKernel, "")(kernel, 1, 1, 1, cuda::kCopyThreads, 1, 1, 0, stream,
                                         &parameter, nullptr),
         "cuLaunchKernel");
    good(KVXFER_CUDA(cuStreamSynchronize, "")(stream), "cuStreamSynchronize");
    good(KVXFER_CUDA(cuModuleUnload, "")(module), "cuModuleUnload");
  }
  KVXFER_CUDA(cuStreamDestroy, "_v2")(stream);
}

}  // namespace

double measure_held_up() {
  const auto writer = good(TransferEngine::create(options_of("local", "writer")));
  const auto reader = good(TransferEngine::create(options_of("local", "reader")));
  const PeerId peer = connect(*writer, *reader);
  const RegionPtr source = good(writer->allocate_on_gpu(0, kCopied));
  const RegionPtr destination = good(reader->allocate_on_gpu(0, kCopied));
  void* pinned = nullptr;
  good(KVXFER_CUDA(cuMemHostAlloc, "")(&pinned, 4096, 0), "cuMemHostAlloc");
  std::memset(pinned, 0, 4096);
  auto* const gate = static_cast<std::uint64_t*>(pinned);
  std::atomic<std::uint64_t> launching = 0;
  std::thread launches([&] { launch_new(gate, launching); });
  double longest = 0;
  bool copying = false;
  for (std::uint64_t number = 1; number <= kKernels; ++number) {
    while (launching < number) std::this_thread::yield();
    for (const auto end = Clock::now() + kWaits; Clock::now() < end;) {
      if (!copying) {
        good(writer->write(peer, source, descriptor_of(destination), {.length = kCopied}));
      }
      copying = writer->drain().empty();
      for (const auto& engine : {writer.get(), reader.get()}) {
        const auto asked = Clock::now();
        (void)engine->stats();
        const std::chrono::duration<double, std::nano> took = Clock::now() - asked;
        longest = std::max(longest, took.count());
      }
    }
    Word(*gate).store(number);
  }
  launches.join();
  while (copying) copying = writer->drain().empty();
  good(writer->deregister(source));
  good(reader->deregister(destination));
  good(KVXFER_CUDA(cuMemFreeHost, "")(pinned), "cuMemFreeHost");
  return longest;
}

}  // namespace kvxfer::gpu_bench
