#include "fabric/nic/gpu_ways.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "memory_region.hpp"
#include "operation.hpp"
#include "random.hpp"

namespace kvxfer {
namespace {

// CUDA begins an allocation of this size with a page; a smaller one has neighbours in its dmabuf.
constexpr std::uint32_t kBytes = 2u << 20;

Error broken(std::string why) { return {Errc::fabric_unavailable, std::move(why)}; }

Result<void> copy(NicLoop& loop, const NicRegistration& source, std::uint64_t from, RemoteKey to) {
  for (std::uint32_t done = 0; done < kBytes; done += kMaxWriteBytes) {
    if (auto good = loop.write(source, from + done, to, kMaxWriteBytes); !good) return good;
    to.address += kMaxWriteBytes;
  }
  return {};
}

// Writes from the host to the GPU and back. In between CUDA reads the bytes, because a NIC that
// reaches the wrong memory would find its own bytes again.
//
// The value says whether the way works. An error says nothing about the way, or nothing lasting: no
// memory, a link that went down.
using Verdict = Result<void>;
Result<Verdict> try_way(NicLoop& loop, const std::shared_ptr<cuda::Gpu>& gpu, MemoryWay way) {
  const auto on_host = MemoryRegion::allocate({}, 2 * std::size_t{kBytes});
  if (!on_host) return on_host.error();
  const auto on_gpu = MemoryRegion::allocate_on({}, gpu, kBytes);
  if (!on_gpu) return on_gpu.error();
  const auto host = loop.register_memory(**on_host, MemoryWay::host);
  if (!host) return host.error();
  const auto memory = loop.register_memory(**on_gpu, way);
  if (!memory) {
    if (memory.error().code == Errc::fabric_unavailable) return Verdict(memory.error());
    return memory.error();
  }
  auto to_gpu = (*memory)->share({});
  auto to_host = (*host)->share({});
  if (!to_gpu) return to_gpu.error();
  if (!to_host) return to_host.error();
  to_host->address += kBytes;

  const std::uint64_t sent = (*on_host)->address();
  const std::uint64_t there = (*on_gpu)->address();
  std::byte* const bytes = (*on_host)->host();
  // If this fails, the way is not at fault.
  if (auto good = copy(loop, **host, sent, *to_host); !good) {
    return Error{Errc::nic_lost, "it does not write to memory of the host: " + good.error().text};
  }
  random_bytes(bytes, kBytes);
  if (auto good = copy(loop, **host, sent, *to_gpu); !good) return good;
  if (gpu->writes_need_flush()) {
    if (auto good = gpu->flush_writes(); !good) return good.error();
  }
  std::vector<std::byte> seen(kBytes);
  if (auto good = gpu->read(there, seen); !good) return good.error();
  if (std::memcmp(seen.data(), bytes, kBytes) != 0) {
    return Verdict(broken("what the NIC wrote did not arrive"));
  }
  if (auto good = copy(loop, **memory, there, *to_host); !good) return good;
  if (std::memcmp(bytes, bytes + kBytes, kBytes) != 0) {
    return Verdict(broken("the NIC read other bytes than the GPU has"));
  }
  return Verdict();
}

}  // namespace

Result<MemoryWay> GpuWays::find(const std::shared_ptr<cuda::Gpu>& gpu) {
  const std::lock_guard lock(mutex_);
  const auto known = std::find_if(known_.begin(), known_.end(),
                                  [&](const auto& each) { return each.first == gpu; });
  if (known != known_.end()) return known->second;
  const std::string what = "NIC " + nic_.name + " does not reach memory of " + gpu->label();
  const Error down{Errc::nic_lost, what +
                                       ": its link is down, so it could not be tried; register "
                                       "the memory again when it is up"};
  if (!nic_.is_up()) return down;
  std::string reasons;
  for (const auto& [way, name] : {std::pair{MemoryWay::dmabuf, std::string("dmabuf")},
                                  std::pair{MemoryWay::peermem, nic_.by_address}}) {
    // Each way has its own loop: a write that failed or did not end would spoil the next way's.
    const auto loop = nic_.open_loop();
    const auto tried = loop ? try_way(**loop, gpu, way) : Result<Verdict>(loop.error());
    if (!tried) {
      return Error{tried.error().code, what + ", as far as could be tried: " + tried.error().text};
    }
    if (*tried) return known_.emplace_back(gpu, way).second;
    reasons += (reasons.empty() ? ": by " : "; by ") + name + ", " + tried->error().text;
  }
  if (!nic_.is_up()) return down;
  return known_.emplace_back(gpu, broken(what + reasons)).second;
}

Result<std::shared_ptr<NicRegistration>> register_gpu_memory(const MemoryRegion& region,
                                                             GpuWays& ways, cuda::Gpus& gpus,
                                                             const RegisterMemory& make) {
  const auto& gpu = region.gpu();
  if (auto good = gpu->takes_nic_writes(); !good) return good.error();
  const auto way = ways.find(gpu);
  if (!way) return way.error();
  auto registered = make(*way);
  if (!registered) return registered;
  gpu->order_copies(region.address());
  gpus.expect_nic_writes(gpu);
  return registered;
}

}  // namespace kvxfer
