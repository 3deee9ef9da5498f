#include "fabric/verbs/gpu_ways.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>

#include "clock.hpp"
#include "error_text.hpp"
#include "fabric/verbs/queue_pair.hpp"
#include "fabric/verbs/receive_queue.hpp"
#include "memory_region.hpp"
#include "random.hpp"

namespace kvxfer::verbs {
namespace {

// CUDA begins an allocation of this size with a page: a smaller one has neighbours in its dmabuf.
constexpr std::size_t kBytes = std::size_t{2} << 20;
// A loop within one NIC takes microseconds.
constexpr std::uint64_t kPatienceNs = 1'000'000'000;
constexpr auto kPause = std::chrono::microseconds(20);

Error broken(std::string why) { return {Errc::fabric_unavailable, std::move(why)}; }

// Two queue pairs of one NIC that write to each other.
class Loop {
 public:
  static Result<std::unique_ptr<Loop>> open(const std::shared_ptr<const VerbsDevice>& device,
                                            const Port& port);
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Returns once the NIC says that the bytes are there.
  Result<void> write(std::uint64_t from, std::uint32_t local_key, std::uint64_t to,
                     std::uint32_t remote_key);

 private:
  explicit Loop(std::shared_ptr<const VerbsDevice> device) : device_(std::move(device)) {}

  std::shared_ptr<const VerbsDevice> device_;
  ibv_cq* completions_ = nullptr;
  std::unique_ptr<ReceiveQueue> receives_;
  std::array<std::shared_ptr<QueuePair>, 2> pairs_;
};

Result<std::unique_ptr<Loop>> Loop::open(const std::shared_ptr<const VerbsDevice>& device,
                                         const Port& port) {
  std::unique_ptr<Loop> loop(new Loop(device));
  loop->completions_ = device->library().create_cq(device->context(), 16, nullptr, nullptr, 0);
  if (!loop->completions_) return broken("no completion queue: " + errno_text());
  auto receives = ReceiveQueue::create(device, kSpareReceives);
  if (!receives) return receives.error();
  loop->receives_ = std::move(*receives);
  std::array<PathEndpoint, 2> ends;
  for (std::size_t i = 0; i < 2; ++i) {
    auto made = QueuePair::create(device, port, loop->completions_, loop->receives_->get(), 1);
    if (!made) return made.error();
    loop->pairs_[i] = std::move(*made);
    ends[i] = {.queue_pair = loop->pairs_[i]->number(),
               .lid = port.lid,
               .mtu = port.mtu,
               .link_layer = port.link_layer,
               .gid = port.gid};
  }
  for (std::size_t i = 0; i < 2; ++i) {
    const PathEndpoint& theirs = ends[1 - i];
    int error = loop->pairs_[i]->join(address_vector(port, theirs, {}), ends[i], theirs);
    if (error == 0) error = loop->pairs_[i]->start(ends[i]);
    if (error != 0) return broken("no way from the NIC to itself: " + errno_text(error));
  }
  return loop;
}

Loop::~Loop() {
  for (const auto& pair : pairs_) {
    if (pair) pair->destroy();
  }
  receives_.reset();
  if (completions_) device_->library().destroy_cq(completions_);
}

Result<void> Loop::write(std::uint64_t from, std::uint32_t local_key, std::uint64_t to,
                         std::uint32_t remote_key) {
  ibv_sge piece{.addr = from, .length = kBytes, .lkey = local_key};
  ibv_send_wr request{.sg_list = &piece,
                      .num_sge = 1,
                      .opcode = IBV_WR_RDMA_WRITE,
                      .send_flags = IBV_SEND_SIGNALED};
  request.wr.rdma = {.remote_addr = to, .rkey = remote_key};
  ibv_send_wr* refused = nullptr;
  if (const int error = ibv_post_send(pairs_[0]->get(), &request, &refused)) {
    return broken("the NIC refused a write: " + errno_text(error));
  }
  const std::uint64_t deadline = now_ns() + kPatienceNs;
  ibv_wc done{};
  int polled = 0;
  while ((polled = ibv_poll_cq(completions_, 1, &done)) == 0) {
    if (now_ns() > deadline) return broken("a write within the NIC did not end");
    std::this_thread::sleep_for(kPause);
  }
  if (polled < 0 || done.status != IBV_WC_SUCCESS) {
    return broken(std::string("a write failed: ") + device_->library().wc_status_str(done.status));
  }
  return {};
}

// Host to GPU and back. In between CUDA is asked: a NIC that reaches the wrong memory would find
// its own bytes again.
//
// Whether it works is the value. An error says nothing about the way, or only for now: no memory, a
// link that went down.
using Verdict = Result<void>;
Result<Verdict> try_way(const std::shared_ptr<const VerbsDevice>& device, const Port& port,
                        const std::shared_ptr<cuda::Gpu>& gpu, MemoryWay way) {
  // A write that failed or did not end would spoil the next way's.
  const auto opened = Loop::open(device, port);
  if (!opened) return opened.error();
  Loop& loop = **opened;
  const auto on_host = MemoryRegion::allocate({}, 2 * kBytes);
  if (!on_host) return on_host.error();
  const auto on_gpu = MemoryRegion::allocate_on({}, gpu, kBytes);
  if (!on_gpu) return on_gpu.error();
  const auto host = VerbsRegistration::create(device, **on_host, MemoryWay::host);
  if (!host) return host.error();
  const auto memory = VerbsRegistration::create(device, **on_gpu, way);
  if (!memory) {
    if (memory.error().code == Errc::fabric_unavailable) return Verdict(memory.error());
    return memory.error();
  }
  const auto& of_host = static_cast<const VerbsRegistration&>(**host);
  const auto& of_gpu = static_cast<const VerbsRegistration&>(**memory);

  const std::uint64_t sent = (*on_host)->address();
  const std::uint64_t there = (*on_gpu)->address();
  std::byte* const bytes = (*on_host)->host();
  random_bytes(bytes, kBytes);
  if (auto good = loop.write(sent, of_host.local_key(), there, of_gpu.remote_key()); !good) {
    return good;
  }
  if (gpu->writes_need_flush()) {
    if (auto good = gpu->flush_writes(); !good) return good.error();
  }
  std::vector<std::byte> seen(kBytes);
  if (auto good = gpu->read(there, seen); !good) return good.error();
  if (std::memcmp(seen.data(), bytes, kBytes) != 0) {
    return Verdict(broken("what the NIC wrote did not arrive"));
  }
  if (auto good = loop.write(there, of_gpu.local_key(), sent + kBytes, of_host.remote_key());
      !good) {
    return good;
  }
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
  const std::string what = "NIC " + device_->name() + " does not reach memory of " + gpu->label();
  const Error down{Errc::nic_lost, what +
                                       ": its link is down, so it could not be tried; register "
                                       "the memory again when it is up"};
  const auto port = device_->query_port();
  if (!port || !port->active) return down;
  std::string reasons;
  for (const auto& [way, name] :
       {std::pair{MemoryWay::dmabuf, "dmabuf"}, std::pair{MemoryWay::peermem, "nvidia-peermem"}}) {
    const auto tried = try_way(device_, *port, gpu, way);
    if (!tried) {
      return Error{tried.error().code, what + ", as far as could be tried: " + tried.error().text};
    }
    if (*tried) return known_.emplace_back(gpu, way).second;
    reasons +=
        (reasons.empty() ? ": by " : "; by ") + std::string(name) + ", " + tried->error().text;
  }
  const auto still = device_->query_port();
  if (!still || !still->active) return down;
  return known_.emplace_back(gpu, broken(what + reasons)).second;
}

}  // namespace kvxfer::verbs
