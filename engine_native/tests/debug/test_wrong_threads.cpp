// The checks of debug builds that the right thread calls an object, by class.
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "debug/engine_parts.hpp"
#include "debug/planted.hpp"
#include "fabric/local/local_path.hpp"
#include "fabric/nic/nic_grants.hpp"
#include "fabric/null/null_domain.hpp"
#include "fabric/null/null_nic.hpp"
#include "fabric/tcp/tcp_domain.hpp"
#include "group/stream_waits.hpp"
#include "moe/moe_group.hpp"
#ifdef KVXFER_HAVE_VERBS
#include "fabric/verbs/async_events.hpp"
#include "fabric/verbs/nic_queues.hpp"
#include "fabric/verbs/path_windows.hpp"
#include "fabric/verbs/receive_queue.hpp"
#include "fabric/verbs/verbs_loop.hpp"
#endif
#ifdef KVXFER_HAVE_OFI
#include "doubles/simulated_efa.hpp"
#include "fabric/ofi/device.hpp"
#include "fabric/ofi/flushes.hpp"
#include "fabric/ofi/ofi_loop.hpp"
#include "fabric/ofi/ofi_path.hpp"
#endif

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

// The first call makes the object this thread's; the second comes from another thread.
void on_two_threads(const std::function<void()>& call) {
  call();
  std::thread(call).join();
}

const moe::Shape kShape{
    .ranks = 1, .experts = 1, .local_experts = {1}, .top_k = 1, .hidden = 64, .max_tokens = 1};

void use_local_path(Parts& parts) {
  auto ends = sockets(SOCK_SEQPACKET);
  const auto ours = good(local::SharedRing::create());
  const auto theirs = good(local::SharedRing::create());
  const auto path = good(local::LocalPath::open(
      {.socket = std::move(ends[0]),
       .out = good(local::SharedRing::map(UniqueFd(::dup(ours.memfd())))),
       .in = good(local::SharedRing::map(UniqueFd(::dup(theirs.memfd())))),
       .wake_peer = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
       .pid = ::getpid(),
       .pidfd = local::open_pidfd(::getpid()),
       .peer_reads_us = true,
       .we_read_peer = true},
      {1, "peer"}, parts.poller, parts.receive_context(), parts.neighbours, parts.gpu_context()));
  on_two_threads([&] { path->revoke_counter(1); });
}

void use_connections(Parts& parts) {
  Connections connections(good(Acceptor::listen("127.0.0.1", 0)),
                          {.options = parts.options,
                           .identity = parts.identity,
                           .poller = parts.poller,
                           .fabrics = parts.fabrics,
                           .peers = parts.peers,
                           .peer_events = parts.neighbours,
                           .operations = parts.operations,
                           .completions = *parts.completions,
                           .stats = parts.stats});
  on_two_threads([&] { connections.expire(1, 0); });
}

void use_dialer(Parts& parts) {
  const auto acceptor = good(Acceptor::listen("127.0.0.1", 0));
  parts.address.host = "127.0.0.1";
  parts.address.port = acceptor->port();
  const auto dialer =
      good(Dialer::dial(parts.address, parts.identity, parts.poller, parts.neighbours));
  on_two_threads([&] { (void)dialer->trouble(); });
}

void use_lane_dialer(Parts& parts) {
  const auto acceptor = good(Acceptor::listen("127.0.0.1", 0));
  parts.address.host = "127.0.0.1";
  parts.address.port = acceptor->port();
  const auto dialer = good(LaneDialer::dial(parts.address, {}, 0, parts.poller, parts.neighbours));
  on_two_threads([&] { (void)dialer->ended(); });
}

void use_stream(Parts& parts) {
  auto ends = sockets(SOCK_STREAM);
  StreamOwner& owner = parts.neighbours;
  const auto stream = good(Stream::open(std::move(ends[0]), parts.poller, owner));
  on_two_threads([&] { stream->write("x"); });
}

void use_peer(Parts& parts) {
  auto ends = sockets(SOCK_STREAM);
  StreamOwner& owner = parts.neighbours;
  Peer peer(1, good(Stream::open(std::move(ends[0]), parts.poller, owner)), {}, parts.neighbours,
            parts.operations);
  on_two_threads([&] { peer.pump(); });
}

void use_nic_link(Parts& parts) {
  NicLink link({.peer = 1, .label = "peer", .theirs = {}, .initiator = false}, parts.nics,
               parts.neighbours, parts.operations);
  on_two_threads([&] { link.tick(1, 0); });
}

void use_tcp_path(Parts& parts) {
  auto ends = sockets(SOCK_STREAM);
  tcp::TcpDomain domain(parts.poller, parts.receive_context(), parts.neighbours, 1u << 20);
  const auto path = good(domain.open_path(std::move(ends[0]), {1, "peer"}));
  on_two_threads([&] { static_cast<tcp::TcpPath&>(*path).step(); });
}

// Calls from two threads until two of the calls overlap.
void use_exchange_at_once() {
  Member member("tcp", kShape, {});
  const auto call = [&] {
    for (int i = 0; i < 10'000'000; ++i) (void)member.exchange->quiet();
  };
  std::thread other(call);
  call();
  other.join();
}

void use_driven_engine() {
  EngineOptions options = options_for("tcp", "driven");
  options.thread = false;
  const auto engine = good(TransferEngine::create(options));
  std::thread([&] { engine->poll(); }).join();
}

#ifdef KVXFER_HAVE_VERBS
struct NoEvents final : verbs::AsyncEventHandler {
  void on_async_event(const ibv_async_event&) override {}
};

void use_async_events(Parts& parts) {
  NoEvents handler;
  const auto events = good(verbs::AsyncEvents::watch(rdma_device(), parts.poller, handler));
  on_two_threads([&] { events->take(); });
}

void use_nic_queues(Parts& parts) {
  const auto queues = good(verbs::NicQueues::create(rdma_device(), 100'000'000'000, parts.poller));
  on_two_threads([&] { (void)queues->poll(); });
}

void use_loop(NicLoop& loop) {
  const auto region = good(MemoryRegion::allocate({}, 4096));
  on_two_threads([&] { (void)loop.register_memory(*region, MemoryWay::host); });
}
#endif

#ifdef KVXFER_HAVE_OFI
std::shared_ptr<const ofi::OpenDomain> open_efa() {
  simulated_efa().add({.name = "planted"});
  const auto library = simulated_efa().library();
  for (ofi::Device& device : good(ofi::find_devices(*library, "efa"))) {
    return good(ofi::OpenDomain::open(*library, std::move(device), false));
  }
  FAIL("there is no device");
  return nullptr;
}

struct NoCompletions final : ofi::CompletionSink {
  void on_written(std::uint64_t) override {}
  void on_arrived(Imm, std::uint64_t) override {}
  void on_failed(Error) override {}
};

std::shared_ptr<ofi::Endpoint> endpoint_of(Parts& parts) {
  return good(ofi::Endpoint::open(open_efa(), parts.poller, {.writes = 16, .immediates = 16}));
}

void use_flushes(Parts& parts) {
  ofi::Flushes flushes(true, std::chrono::seconds(1), parts.poller);
  const auto endpoint = endpoint_of(parts);
  const auto entry = flushes.add(1, *endpoint);
  std::thread([&] { flushes.finish(*entry, 0); }).join();
}
#endif

}  // namespace

std::vector<Mistake> kvxfer::test::wrong_threads() {
  return {
      {"Acceptor",
       [] {
         const auto acceptor = good(Acceptor::listen("127.0.0.1", 0));
         on_two_threads([&] { acceptor->expire(0); });
       }},
      {"Background",
       with_parts([](Parts& parts) { on_two_threads([&] { parts.background.finish(); }); })},
      {"CompletionRing",
       [] {
         null::CompletionRing ring;
         on_two_threads([&] { ring.pop(); });
       }},
      {"CompletionRing",
       [] {
         null::CompletionRing ring;
         on_two_threads([&] { ring.push(0, 0, 0); });
       }},
      {"Connections", with_parts(use_connections)},
      {"Dialer", with_parts(use_dialer)},
      {"EngineLoop", with_parts([](Parts& parts) {
         EngineLoop loop(good(Poller::create()), parts.neighbours);
         on_two_threads([&] { loop.run_commands(); });
       })},
      {"Exchange", use_exchange_at_once},
      {"ExposedMemory", with_parts([](Parts& parts) {
         ExposedMemory exposed = parts.exposed();
         on_two_threads([&] { exposed.on_revoked(1, 1); });
       })},
      {"Fabrics", with_parts([](Parts& parts) { on_two_threads([&] { parts.fabrics.poll(); }); })},
#ifdef KVXFER_HAVE_CUDA_DOUBLE
      {"Gpu", with_gpu([](cuda::Gpu& gpu) { on_two_threads([&] { gpu.room(); }); })},
#endif
      {"GpuShares", with_parts([](Parts& parts) {
         std::uint32_t next = 0;
         local::GpuShares shares(parts.gpu_context(), -1, true, {}, next);
         const auto region = good(MemoryRegion::allocate({}, 4096));
         on_two_threads([&] { shares.forget(*region); });
       })},
      {"GpuSources", with_parts([](Parts& parts) {
         local::GpuSources sources(parts.gpu_context(), nullptr, [](std::uint32_t) {});
         on_two_threads([&] { sources.remove(1); });
       })},
      {"Gpus", with_parts([](Parts& parts) { on_two_threads([&] { parts.gpus.poll(); }); })},
      {"ImmCounters",
       with_parts([](Parts& parts) { on_two_threads([&] { parts.counters.release(1); }); })},
      {"LaneDialer", with_parts(use_lane_dialer)},
      {"LentMemory",
       with_parts([](Parts& parts) { on_two_threads([&] { parts.lent.ask_back(1, "peer"); }); })},
      {"Listener",
       [] {
         Listener listener{UniqueFd()};
         on_two_threads([&] { listener.resume(); });
       }},
      {"LocalDomain", with_parts([](Parts& parts) {
         const auto domain = good(
             local::LocalDomain::open(parts.address.engine, parts.poller, parts.receive_context(),
                                      parts.neighbours, parts.neighbours, parts.gpu_context()));
         on_two_threads([&] { domain->poll(); });
       })},
      {"LocalPath", with_parts(use_local_path)},
      {"LostWrites", with_parts([](Parts& parts) {
         LostWrites lost(1, parts.operations);
         on_two_threads([&] { lost.fail_incomplete({}, "no path"); });
       })},
      {"MemoryRegion",
       [] {
         const auto region = good(MemoryRegion::allocate({}, 4096));
         on_two_threads([&] { region->end_use(); });
       }},
      {"NicGrants", with_parts([](Parts& parts) {
         NicGrants grants(parts.neighbours);
         on_two_threads([&] { grants.close({}, {}); });
       })},
      {"NicLink", with_parts(use_nic_link)},
      {"NicPath", with_parts([](Parts& parts) {
         const BarePath path = parts.path("null");
         on_two_threads([&] { (void)path->take_unfinished(); });
       })},
      {"NullDomain", with_parts([](Parts& parts) {
         NicDomain& nic = parts.nic("null");
         on_two_threads([&] { nic.poll(); });
       })},
      {"NullPath", with_parts([](Parts& parts) {
         const BarePath path = parts.path("null");
         on_two_threads([&] { path->connect("nowhere", [](const Result<void>&) {}); });
       })},
      {"OperationPtr",
       [] {
         const OperationPtr operation = operation_of(nullptr, {}, 1, 64, std::nullopt);
         std::thread([&] { const OperationPtr copy = operation; }).join();
       }},
      {"Operations",
       with_parts([](Parts& parts) { on_two_threads([&] { parts.operations.expire(0); }); })},
      {"Peer", with_parts(use_peer)},
      {"Peers", with_parts([](Parts& parts) { on_two_threads([&] { parts.peers.find(1); }); })},
      {"Poller", with_parts([](Parts& parts) { on_two_threads([&] { parts.poller.poll(0); }); })},
      {"RemoteRegions", with_parts([](Parts& parts) {
         RemoteRegions regions(1, "peer", parts.neighbours, parts.operations);
         on_two_threads([&] { regions.set_paths(0); });
       })},
      {"SendQueue",
       [] {
         null::CompletionRing ring;
         null::SendQueue queue(ring);
         on_two_threads([&] { queue.next(); });
       }},
      {"SourceMemory",
       [] {
         local::SourceMemory memory(::getpid(), UniqueFd());
         on_two_threads([&] { (void)memory.read({}); });
       }},
      {"Stream", with_parts(use_stream)},
      {"StreamWaits", with_parts([](Parts& parts) {
         StreamWaits waits(parts.counters);
         on_two_threads([&] { waits.poll(0); });
       })},
      {"TcpDomain", with_parts([](Parts& parts) {
         tcp::TcpDomain domain(parts.poller, parts.receive_context(), parts.neighbours, 1u << 20);
         on_two_threads([&] { domain.poll(); });
       })},
      {"TcpPath", with_parts(use_tcp_path)},
      {"TransferEngine", use_driven_engine},
#ifdef KVXFER_HAVE_VERBS
      {"AsyncEvents", with_parts(use_async_events)},
      {"NicQueues", with_parts(use_nic_queues)},
      {"PathWindows",
       [] {
         verbs::PathWindows windows(nullptr);
         on_two_threads([&] { windows.close(1); });
       }},
      {"ReceiveQueue",
       [] {
         const auto receives = good(verbs::ReceiveQueue::create(rdma_device(), 1024));
         on_two_threads([&] { receives->replace(0); });
       }},
      {"VerbsDomain", with_parts([](Parts& parts) {
         NicDomain& nic = parts.nic("mlx5");
         on_two_threads([&] { nic.poll(); });
       })},
      {"VerbsLoop", [] { use_loop(*good(verbs::VerbsLoop::open(rdma_device()))); }},
      {"VerbsPath", with_parts([](Parts& parts) {
         const BarePath path = parts.path("mlx5");
         on_two_threads([&] { path->connect("nowhere", [](const Result<void>&) {}); });
       })},
#endif
#ifdef KVXFER_HAVE_OFI
      {"Endpoint", with_parts([](Parts& parts) {
         NoCompletions sink;
         const auto endpoint = endpoint_of(parts);
         endpoint->serve(sink, parts.poller);
         std::thread([&] { endpoint->poll(); }).join();
       })},
      {"Flushes", with_parts(use_flushes)},
      {"OfiDomain", with_parts([](Parts& parts) {
         NicDomain& nic = parts.nic("efa");
         on_two_threads([&] { nic.poll(); });
       })},
      {"OfiLoop", with_parts([](Parts& parts) {
         use_loop(*good(ofi::OfiLoop::open(open_efa(), parts.poller)));
       })},
      {"OfiPath", with_parts([](Parts& parts) {
         const BarePath path = parts.path("efa");
         on_two_threads([&] { path->connect("nowhere", [](const Result<void>&) {}); });
       })},
      {"OpenDomain",
       [] {
         const auto domain = open_efa();
         on_two_threads([&] { (void)domain->failure(); });
       }},
#endif
  };
}

TEST_SUITE_BEGIN("debug checks");

TEST_CASE("a call from a wrong thread ends a debug build, for each class that has a thread") {
  check_all("thread", wrong_threads());
}

TEST_SUITE_END();
