#include "fabric/verbs/verbs_loop.hpp"

#include <string>
#include <thread>
#include <utility>

#include "clock.hpp"
#include "error_text.hpp"
#include "fabric/verbs/verbs_registration.hpp"

namespace kvxfer::verbs {

Result<std::unique_ptr<NicLoop>> VerbsLoop::open(const std::shared_ptr<const VerbsDevice>& device) {
  std::unique_ptr<VerbsLoop> loop(new VerbsLoop(device));
  if (auto good = loop->start(); !good) return good.error();
  return std::unique_ptr<NicLoop>(std::move(loop));
}

Result<void> VerbsLoop::start() {
  const auto port = device_->query_port();
  if (!port || !port->active) return Error{Errc::nic_lost, "its link is down"};
  completions_ = device_->library().create_cq(device_->context(), 16, nullptr, nullptr, 0);
  if (!completions_) return broken("no completion queue: " + errno_text());
  auto receives = ReceiveQueue::create(device_, kSpareReceives);
  if (!receives) return receives.error();
  receives_ = std::move(*receives);
  std::array<PathEndpoint, 2> ends;
  for (std::size_t i = 0; i < 2; ++i) {
    auto made = QueuePair::create(device_, *port, completions_, receives_->get(), 1);
    if (!made) return made.error();
    pairs_[i] = std::move(*made);
    ends[i] = {.queue_pair = pairs_[i]->number(),
               .lid = port->lid,
               .mtu = port->mtu,
               .link_layer = port->link_layer,
               .gid = port->gid};
  }
  for (std::size_t i = 0; i < 2; ++i) {
    const PathEndpoint& theirs = ends[1 - i];
    int error = pairs_[i]->join(address_vector(*port, theirs, {}), ends[i], theirs);
    if (error == 0) error = pairs_[i]->start(ends[i]);
    if (error != 0) return broken("no way from the NIC to itself: " + errno_text(error));
  }
  return {};
}

VerbsLoop::~VerbsLoop() {
  for (const auto& pair : pairs_) {
    if (pair) pair->destroy();
  }
  receives_.reset();
  if (completions_) device_->library().destroy_cq(completions_);
}

Result<std::shared_ptr<NicRegistration>> VerbsLoop::register_memory(const MemoryRegion& region,
                                                                    MemoryWay way) {
  thread_.check("VerbsLoop");
  return VerbsRegistration::create(device_, region, way);
}

Result<void> VerbsLoop::write(const NicRegistration& source, std::uint64_t from,
                              const RemoteKey& to, std::uint32_t bytes) {
  thread_.check("VerbsLoop");
  ibv_sge piece{.addr = from,
                .length = bytes,
                .lkey = static_cast<const VerbsRegistration&>(source).local_key()};
  ibv_send_wr request{.sg_list = &piece,
                      .num_sge = 1,
                      .opcode = IBV_WR_RDMA_WRITE,
                      .send_flags = IBV_SEND_SIGNALED};
  request.wr.rdma = {.remote_addr = to.address, .rkey = static_cast<std::uint32_t>(to.rkey)};
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

}  // namespace kvxfer::verbs
