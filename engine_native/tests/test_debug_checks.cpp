// The checks of debug builds: that the right thread calls an object, and invariants between calls.
// Each mistake is made by this program, run again with the mistake's name, and must end it.
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <type_traits>

#include "bare_path.hpp"
#include "bootstrap/acceptor.hpp"
#include "bootstrap/dialer.hpp"
#include "cuda/gpus.hpp"
#include "fabric/local/local_domain.hpp"
#include "fabric/local/local_path.hpp"
#include "fabric/nic/nic_grants.hpp"
#include "fabric/nic/nic_link.hpp"
#include "fabric/null/null_domain.hpp"
#include "fabric/null/null_nic.hpp"
#include "fabric/tcp/tcp_domain.hpp"
#include "group/connections.hpp"
#include "group/engine_loop.hpp"
#include "group/exposed_memory.hpp"
#include "group/operations.hpp"
#include "group/stream_waits.hpp"
#include "moe/own_memory.hpp"
#include "moe_group.hpp"
#include "support.hpp"
#include "thread_owner.hpp"
#ifdef KVXFER_HAVE_CUDA_DOUBLE
#include "cuda_driver.hpp"
#endif
#ifdef KVXFER_HAVE_VERBS
#include "fabric/verbs/async_events.hpp"
#include "fabric/verbs/nic_queues.hpp"
#include "fabric/verbs/path_budget.hpp"
#include "fabric/verbs/path_windows.hpp"
#include "fabric/verbs/receive_queue.hpp"
#include "fabric/verbs/verbs_device.hpp"
#include "fabric/verbs/verbs_loop.hpp"
#include "simulated_verbs.hpp"
#endif
#ifdef KVXFER_HAVE_OFI
#include "fabric/ofi/device.hpp"
#include "fabric/ofi/flushes.hpp"
#include "fabric/ofi/ofi_loop.hpp"
#include "fabric/ofi/ofi_path.hpp"
#include "simulated_efa.hpp"
#endif

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

static_assert(kChecksThreads || (std::is_empty_v<ThreadOwner> && std::is_empty_v<OneAtATime>),
              "a release build has no checks");

// The first call makes the object this thread's; the second comes from another thread.
void on_two_threads(const std::function<void()>& call) {
  call();
  std::thread(call).join();
}

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

// The parts that an engine's objects are made with.
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
  NicDomain& nic(const std::string& fabric) {
    options = options_for(fabric, "planted");
    if (fabric == "null") options.more_nics = std::make_shared<null::NullFactory>(true);
    nics = good(options.more_nics->open({.options = options,
                                         .poller = poller,
                                         .background = background,
                                         .gpus = gpus,
                                         .receive_context = receive_context(),
                                         .events = neighbours,
                                         .first_number = 0}))
               .nics;
    return *nics.front();
  }
  BarePath path(const std::string& fabric) {
    return good(BarePath::open(nic(fabric), {.id = 1, .peer = 1, .label = "'planted'"},
                               [this](const std::function<bool()>& so) {
                                 while (!so()) {
                                   if (background.finish() == 0) std::this_thread::yield();
                                 }
                               }));
  }
  ExposedMemory exposed() {
    return ExposedMemory({.engine = address.engine,
                          .fabrics = fabrics,
                          .peers = peers,
                          .background = background,
                          .gpus = gpus,
                          .counters = counters,
                          .regions = regions,
                          .completions = *completions,
                          .stats = stats});
  }
};

std::array<UniqueFd, 2> sockets(int type) {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

// A submission of one write that no path has.
SubmissionPtr one_write(const std::shared_ptr<PeerHandle>& handle) {
  auto submission = std::make_shared<Submission>();
  submission->writes.resize(1);
  Operation& part = submission->parts.emplace_back();
  part.handle = handle;
  part.writes = submission->writes;
  return submission;
}

struct Mistake {
  const char* name;
  std::function<void()> make;
};

// --- calls from a wrong thread, by class -----------------------------------------------------

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
std::shared_ptr<const verbs::VerbsDevice> rdma_device() {
  simulated_verbs().add({.name = "planted"});
  const auto library = simulated_verbs().library();
  ibv_device** const list = library->get_device_list(nullptr);
  ibv_device** found = list;
  while (std::string("planted") != (*found)->name) ++found;
  auto opened = good(verbs::VerbsDevice::open(library, *found, {.name = "planted"}));
  library->free_device_list(list);
  return opened;
}

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

std::vector<Mistake> wrong_threads() {
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

// --- broken invariants, by the text of their assertions --------------------------------------

// A path whose batches the test finishes.
struct BookedPath final : NicPath {
  BookedPath(Parts& parts, NicLoad& load)
      : NicPath({.label = "'planted'"}, 16, load, parts.receive_context(), parts.neighbours) {}
  std::string_view fabric() const override { return "planted"; }
  std::string endpoint() const override { return {}; }
  void connect(std::string_view, Connected) override {}
  void shut(std::function<void()>) override {}
  std::size_t post(const OperationPtr& operation, const WriteRange& writes) override {
    add_batch(operation, writes, operation->bytes);
    return writes.count;
  }
  using NicPath::finish_through;
};

moe::Shape two_ranks() {
  moe::Shape shape = kShape;
  shape.ranks = shape.experts = 2;
  shape.local_experts = {1, 1};
  return shape;
}

std::vector<Mistake> broken_invariants() {
  return {
      {"posted <= writes.size()", [] { operation_of(nullptr, {}, 1, 64, {})->took(2); }},
      {"count <= range.count",
       [] {
         const OperationPtr operation = operation_of(nullptr, {}, 3, 64, {});
         operation->took(3);
         operation->reposts.push_back({.first = 0, .count = 1});
         operation->took(2);
       }},
      {"range.count <= outstanding",
       [] { operation_of(nullptr, {}, 1, 64, {})->finish({.first = 0, .count = 1}, true); }},
      {"range.count <= *uncounted_left",
       [] {
         const OperationPtr operation = operation_of(nullptr, {}, 2, 64, 1);
         operation->took(2);
         operation->uncounted_left = std::make_shared<std::size_t>(1);
         operation->finish({.first = 0, .count = 2, .counted = false}, true);
       }},
      {"queued >= operation->writes.size()", with_parts([](Parts& parts) {
         parts.operations.begin(one_write(std::make_shared<PeerHandle>()));
       })},
      {"submissions_.empty()",
       [] {
         const auto completions = good(CompletionQueue::create());
         Operations operations({}, std::chrono::seconds(1), *completions);
         const auto handle = std::make_shared<PeerHandle>();
         handle->up = reinterpret_cast<Peer*>(handle.get());  // not used, as the write is held
         const SubmissionPtr submission = one_write(handle);
         submission->parts.front().after = {std::make_shared<WatchWord>(), 1};
         operations.begin(submission);
       }},
      {"all_.empty() && closing_.empty()", with_parts([](Parts& parts) {
         auto ends = sockets(SOCK_STREAM);
         StreamOwner& owner = parts.neighbours;
         Peers peers;
         peers.add(good(Stream::open(std::move(ends[0]), parts.poller, owner)), {},
                   parts.neighbours, parts.operations);
       })},
      {"found != all_.end()", with_parts([](Parts& parts) { parts.peers.begin_closing(1, {}); })},
      {"found != closing_.end()", with_parts([](Parts& parts) { parts.peers.finish_closing(1); })},
      {"commands_.empty()", with_parts([](Parts& parts) {
         EngineLoop loop(good(Poller::create()), parts.neighbours);
         loop.post([] {});
       })},
      {"batch.bytes <= outstanding_bytes_", with_parts([](Parts& parts) {
         NicLoad load;
         BookedPath path(parts, load);
         path.post(operation_of(nullptr, {}, 1, 64, {}), {.first = 0, .count = 1});
         load.bytes = 0;
         path.finish_through(1);
       })},
#ifdef KVXFER_HAVE_CUDA_DOUBLE
      {"under_way() < kLaunches", with_gpu([](cuda::Gpu& gpu) {
         while (true) gpu.launch(1);
       })},
      {"find(free_, slot, &Free::slot) == free_.end()", with_gpu([](cuda::Gpu& gpu) {
         const auto slot = gpu.slot_to_receive();
         gpu.give_back(slot->bytes(), false);
       })},
#endif
      {"taken_[number]", [] { good(moe::OwnMemory::create(two_ranks())).give_inbox(0); }},
      {"std::ranges::find(taken_, true) == taken_.end()",
       [] { (void)good(good(moe::OwnMemory::create(two_ranks())).take_inbox()); }},
#ifdef KVXFER_HAVE_VERBS
      {"paths_ > 0", [] { verbs::PathBudget(1024, 1024, 64).give_back({}); }},
      {"receives <= wanted_ - kSpareReceives",
       [] { good(verbs::ReceiveQueue::create(rdma_device(), 1024))->release(1); }},
      {"wanted_ == kSpareReceives",
       [] { good(verbs::ReceiveQueue::create(rdma_device(), 1024))->reserve(1); }},
      {"requests_ > 0", [] { verbs::PathWindows(nullptr).on_done(0); }},
#endif
  };
}

// --- planting the mistakes -------------------------------------------------------------------

constexpr const char* kPlanted = "KVXFER_PLANTED";

struct Ended {
  bool aborted = false;
  std::string said;
};

// Runs this program again, with that mistake of a list.
Ended run_with(const std::string& list, std::size_t number) {
  std::array<char, 4096> program{};
  REQUIRE(::readlink("/proc/self/exe", program.data(), program.size() - 1) > 0);
  const std::string command = std::string(kPlanted) + "=" + list + std::to_string(number) + " '" +
                              program.data() +
                              "' --no-version --no-skip --test-case='a planted mistake' 2>&1";
  FILE* const out = ::popen(command.c_str(), "r");
  REQUIRE(out != nullptr);
  Ended ended;
  std::array<char, 4096> some{};
  while (const std::size_t got = std::fread(some.data(), 1, some.size(), out)) {
    ended.said.append(some.data(), got);
  }
  const int status = ::pclose(out);
  const int by_shell = 128 + SIGABRT;
  ended.aborted = (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT) ||
                  (WIFEXITED(status) && WEXITSTATUS(status) == by_shell);
  return ended;
}

void check_all(const std::string& list, const std::vector<Mistake>& mistakes) {
  if (!kChecksThreads) {
    MESSAGE("skipped: a release build checks nothing");
    return;
  }
  std::string names;
  for (std::size_t number = 0; number < mistakes.size(); ++number) {
    const std::string name = mistakes[number].name;
    CAPTURE(name);
    const Ended ended = run_with(list, number);
    CHECK_MESSAGE(ended.aborted, ended.said);
    CHECK_MESSAGE(ended.said.find(name) != std::string::npos, ended.said);
    names += "\n  " + name;
  }
  MESSAGE(mistakes.size() << " mistakes end a debug build:" << names);
}

}  // namespace

TEST_SUITE_BEGIN("debug checks");

TEST_CASE("a call from a wrong thread ends a debug build, for each class that has a thread") {
  check_all("thread", wrong_threads());
}

TEST_CASE("a broken invariant ends a debug build") { check_all("invariant", broken_invariants()); }

TEST_CASE("a planted mistake" * doctest::skip()) {
  const char* const chosen = std::getenv(kPlanted);
  if (!chosen) return;
  std::signal(SIGABRT, SIG_DFL);  // under ThreadSanitizer, doctest's handler does not work
  const std::string planted = chosen;
  const bool thread = planted.starts_with("thread");
  const auto mistakes = thread ? wrong_threads() : broken_invariants();
  const std::size_t digits = planted.find_first_of("0123456789");
  mistakes.at(std::stoul(planted.substr(digits))).make();
}

TEST_SUITE_END();
