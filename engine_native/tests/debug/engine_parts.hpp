// The parts of an engine, without an engine: a test makes one object of them and misuses it.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/acceptor.hpp"
#include "bootstrap/dialer.hpp"
#include "cuda/gpus.hpp"
#include "doubles/bare_path.hpp"
#include "fabric/local/local_domain.hpp"
#include "fabric/nic/nic_link.hpp"
#include "group/connections.hpp"
#include "group/engine_loop.hpp"
#include "group/exposed_memory.hpp"
#include "group/operations.hpp"
#include "support.hpp"
#ifdef KVXFER_HAVE_CUDA_DOUBLE
#include "doubles/cuda_driver.hpp"
#endif
#ifdef KVXFER_HAVE_VERBS
#include "fabric/verbs/verbs_device.hpp"
#endif

namespace kvxfer::test {

// The objects that others report to.
struct Neighbours final : PeerEvents,
                          OperationBook,
                          StreamOwner,
                          NicLinkOwner,
                          NicEvents,
                          AcceptorEvents,
                          DialerEvents,
                          LoopWork,
                          local::LocalEvents {
  void on_up(Peer&) override {}
  void on_message(Peer&, std::string) override {}
  void on_posted(std::size_t) override {}
  void on_peer_lost(Peer&, Error) override {}
  void share_region(Peer&, std::uint64_t) override {}
  void on_revoked(Peer&, Imm) override {}
  void fail(const OperationPtr&, Errc, std::string) override {}
  void settle(const OperationPtr&) override {}
  std::vector<OperationPtr> with(PeerId, Imm) const override { return {}; }
  void on_input(std::string&) override {}
  void on_sent() override {}
  void on_stream_lost(Error) override {}
  void send_nic_frame(NicFrame, std::string) override {}
  void lose_peer(Error) override {}
  void queue(const OperationPtr&) override {}
  void share_region(std::uint64_t) override {}
  void on_revoked(Imm) override {}
  void on_paths_changed() override {}
  void on_notice(std::string) override {}
  void on_notice(Peer&, std::string) override {}
  bool has_other_ways() const override { return false; }
  void on_finished(const OperationPtr&, const WriteRange&, const Error&) override {}
  void on_lost(Path&, Error) override {}
  void on_nic_state(NicDomain&) override {}
  void on_credit_due(NicPath&) override {}
  void on_refused(NicPath&, Imm) override {}
  void on_window(NicPath&, std::uint64_t) override {}
  void on_accepted(std::unique_ptr<Stream>, const Session&) override {}
  void on_lane_hello(UniqueFd, const std::string&) override {}
  void on_handshake_refused(Errc) override {}
  void on_dialed(Dialer&, Result<Session>) override {}
  void on_lane_dialed(LaneDialer&, Result<UniqueFd>) override {}
  void step() override {}
  std::uint64_t next_step_ns(std::uint64_t now, std::uint64_t) const override { return now; }
  bool prepare_sleep() override { return false; }
  void finish_sleep() override {}
  void shut_down() override {}
  const Session* find_session(const SessionId&) override { return nullptr; }
  void on_local_link(const SessionId&, Result<local::LocalLink>) override {}
  void on_stranger_refused(Errc) override {}
};

struct Parts {
  Poller poller = good(Poller::create());
  std::unique_ptr<CompletionQueue> completions = good(CompletionQueue::create());
  ImmCounters counters{*completions};
  RegionTable regions;
  EngineStats stats;
  std::uint64_t activity = 0;
  cuda::Gpus gpus;
  Neighbours neighbours;
  EngineOptions options;
  EngineAddress address;
  Identity identity{.cluster_key = "a key for the tests only"};
  Fabrics fabrics;
  Peers peers;
  Operations operations{{}, std::chrono::seconds(1), *completions};
  std::vector<std::unique_ptr<NicDomain>> nics;
  Background background{poller};
  local::LentMemory lent{poller};

  local::GpuContext gpu_context() {
    return {gpus, background, lent, [](const std::string&) {}};
  }
  ReceiveContext receive_context() { return {regions, counters, stats, activity, gpus}; }
  // Opens the first NIC of one of the fabrics of options_for().
  NicDomain& nic(const std::string& fabric);
  BarePath path(const std::string& fabric);
  ExposedMemory exposed();
};

// The ends of a connection.
std::array<UniqueFd, 2> sockets(int type);
#ifdef KVXFER_HAVE_VERBS
std::shared_ptr<const verbs::VerbsDevice> rdma_device();
#endif

template <class Use>
std::function<void()> with_parts(Use use) {
  return [use] {
    Parts parts;
    use(parts);
  };
}
#ifdef KVXFER_HAVE_CUDA_DOUBLE
template <class Use>
std::function<void()> with_gpu(Use use) {
  return [use] {
    const CudaDriver driver;
    cuda::Gpus gpus;
    use(*good(gpus.open(0)));
  };
}
#endif

}  // namespace kvxfer::test
