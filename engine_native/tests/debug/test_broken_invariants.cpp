// The checks of debug builds of invariants between calls, by the text of their assertions.
#include <sys/socket.h>

#include "debug/engine_parts.hpp"
#include "debug/planted.hpp"
#include "moe/own_memory.hpp"
#ifdef KVXFER_HAVE_VERBS
#include "fabric/verbs/path_budget.hpp"
#include "fabric/verbs/path_windows.hpp"
#include "fabric/verbs/receive_queue.hpp"
#endif

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

// A submission of one write that no path has.
SubmissionPtr one_write(const std::shared_ptr<PeerHandle>& handle) {
  auto submission = std::make_shared<Submission>();
  submission->writes.resize(1);
  Operation& part = submission->parts.emplace_back();
  part.handle = handle;
  part.writes = submission->writes;
  return submission;
}

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
  return {
      .ranks = 2, .experts = 2, .local_experts = {1, 1}, .top_k = 1, .hidden = 64, .max_tokens = 1};
}

}  // namespace

std::vector<Mistake> kvxfer::test::broken_invariants() {
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

TEST_SUITE_BEGIN("debug checks");

TEST_CASE("a broken invariant ends a debug build") { check_all("invariant", broken_invariants()); }

TEST_SUITE_END();
