#include "bounds.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "gpu_memory.hpp"
#include "tcp.hpp"

namespace kvxfer::gpu_bench {
namespace {

constexpr std::size_t kRuns = 5;

double seconds_of(const std::function<void()>& work) {
  const auto begun = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// Returns the best bandwidth of kRuns runs, after one that is not counted.
double bandwidth(const std::function<void()>& work) {
  work();
  double best = 1e9;
  for (std::size_t i = 0; i < kRuns; ++i) best = std::min(best, seconds_of(work));
  return static_cast<double>(kRequestBytes) / best;
}

double measure_tcp(Receiver& receiver) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (::bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::listen(listener, 1) != 0 ||
      ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    give_up("cannot listen on the loopback");
  }
  receiver.begin_tcp(ntohs(address.sin_port), kRuns);
  const int fd = ::accept(listener, nullptr, nullptr);
  const std::vector<std::byte> buffer(std::size_t{64} << 20);
  const auto took = probes::tcp_send(fd, kRequestBytes, kRuns, buffer);
  receiver.end_tcp();
  ::close(fd);
  ::close(listener);
  const auto best = *std::min_element(took.begin(), took.end());
  return static_cast<double>(kRequestBytes) / (static_cast<double>(best) * 1e-9);
}

}  // namespace

Bounds measure_bounds(Receiver& receiver) {
  CUdeviceptr from = 0;
  CUdeviceptr to = 0;
  void* pinned = nullptr;
  CUstream stream = nullptr;
  good(KVXFER_CUDA(cuMemAlloc, "_v2")(&from, kRequestBytes), "cuMemAlloc");
  good(KVXFER_CUDA(cuMemAlloc, "_v2")(&to, kRequestBytes), "cuMemAlloc");
  good(KVXFER_CUDA(cuMemHostAlloc, "")(&pinned, kRequestBytes, 0), "cuMemHostAlloc");
  good(KVXFER_CUDA(cuStreamCreate, "")(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  const auto copy = KVXFER_CUDA(cuMemcpyAsync, "");
  const auto wait = KVXFER_CUDA(cuStreamSynchronize, "");
  const auto host = reinterpret_cast<CUdeviceptr>(pinned);
  const auto measure = [&](CUdeviceptr target, CUdeviceptr source) {
    return bandwidth([&] {
      good(copy(target, source, kRequestBytes, stream), "cuMemcpyAsync");
      good(wait(stream), "cuStreamSynchronize");
    });
  };
  const Bounds bounds{.device_copy = measure(to, from),
                      .to_device = measure(to, host),
                      .to_host = measure(host, from),
                      .tcp = measure_tcp(receiver)};
  KVXFER_CUDA(cuStreamDestroy, "_v2")(stream);
  KVXFER_CUDA(cuMemFreeHost, "")(pinned);
  KVXFER_CUDA(cuMemFree, "_v2")(to);
  KVXFER_CUDA(cuMemFree, "_v2")(from);
  return bounds;
}

double measure_kernel(std::size_t page_bytes) {
  cuda::Gpus gpus;
  const auto gpu = good(gpus.open(0));
  const auto from = good(gpu->allocate(kPoolBytes));
  const auto to = good(gpu->allocate(kPoolBytes));
  const PageLists pages = draw(page_bytes, kRequestBytes);
  const double found = bandwidth([&] {
    for (std::size_t at = 0; at < pages.source.size();) {
      const auto room = gpu->room();
      gpu->poll();
      if (room.empty()) continue;
      const std::size_t count = std::min(room.size(), pages.source.size() - at);
      for (std::size_t i = 0; i < count; ++i, ++at) {
        room[i] = {from + static_cast<std::uint64_t>(pages.source[at]) * page_bytes,
                   to + static_cast<std::uint64_t>(pages.destination[at]) * page_bytes,
                   static_cast<std::uint32_t>(page_bytes)};
      }
      gpu->launch(count);
    }
    while (gpu->busy()) gpu->poll();
    if (gpu->failure()) give_up(gpu->failure()->text);
  });
  gpu->free(to);
  gpu->free(from);
  return found;
}

}  // namespace kvxfer::gpu_bench
