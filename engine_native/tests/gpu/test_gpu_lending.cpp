// GPU memory that an engine of another process has open must not be freed before it is closed
// there.
#include <sys/wait.h>

#include <csignal>
#include <cstdlib>
#include <future>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "gpu/gpu_memory.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

TEST_SUITE_BEGIN("cuda");

namespace {

constexpr const char* kWriter = "KVXFER_TEST_WRITER";
constexpr std::string_view kHold = "hold";
constexpr std::string_view kHeld = "held";
constexpr std::string_view kLetGo = "let go";

bool tells(const Completion& completion) {
  return completion.kind == Completion::Kind::message ||
         completion.kind == Completion::Kind::peer_down;
}

// An engine of another process, which has a region of this process' GPU memory open.
class Borrower {
 public:
  Borrower(TestEngine& writer, const RegionPtr& source) : writer_(writer) {
    ::setenv(kWriter, writer->address().text().c_str(), 1);
    child_ = start_case("the double: an engine of another process");
    ::unsetenv(kWriter);
    const Completion hello = writer.await(Completion::Kind::message);
    id_ = hello.peer;
    const MrDescriptor there = good(MrDescriptor::decode(hello.data));
    for (bool direct = false; !direct;) {
      const std::uint64_t staged = writer->stats().bytes_staged;
      const auto submitted =
          good(writer->write(id_, source, there, {0, 0, source->size()}, {.timeout = kDeadline}));
      REQUIRE(writer.await(Completion::Kind::write, submitted.id).code == Errc::ok);
      direct = writer->stats().bytes_staged == staged;
    }
  }
  ~Borrower() { kill(); }
  Borrower(const Borrower&) = delete;
  Borrower& operator=(const Borrower&) = delete;

  PeerId id() const { return id_; }
  // Keeps its GPU busy, so that it can close nothing until let_go(), or until a moment after it has
  // lost its peer.
  void hold() {
    tell(kHold);
    CHECK(writer_.await(Completion::Kind::message).data == kHeld);
  }
  void let_go() { tell(kLetGo); }
  void kill() {
    if (child_ == 0) return;
    ::kill(child_, SIGKILL);
    ::waitpid(std::exchange(child_, 0), nullptr, 0);
  }

 private:
  void tell(std::string_view what) { good(writer_->send(id_, std::string(what))); }

  TestEngine& writer_;
  pid_t child_ = 0;
  PeerId id_ = 0;
};

struct Bench {
  explicit Bench(Duration peer_timeout = kDeadline)
      : writer([&] {
          auto options = options_for("local", "writer");
          options.peer_timeout = peer_timeout;
          return options;
        }()) {}
  // The driver checks that all others have closed the memory; otherwise it poisons the context.
  void free_memory() {
    CU(MemFree)(memory);
    CHECK(CU(CtxSynchronize)() == CUDA_SUCCESS);
  }
  CudaDriver driver;
  TestEngine writer;
  CUdeviceptr memory = allocate(kBlock);
  RegionPtr source = good(writer->register_memory(reinterpret_cast<void*>(memory), kBlock));
  Borrower borrower{writer, source};
};

constexpr Duration kAMoment = std::chrono::milliseconds(200);

}  // namespace

TEST_CASE("the double: an engine of another process" * doctest::skip()) {
  const CudaDriver driver;
  TestEngine reader(options_for("local", "reader"));
  const auto connecting =
      reader->connect(good(EngineAddress::parse(std::getenv(kWriter))), kDeadline);
  const PeerId writer = reader.await(Completion::Kind::connect, connecting).peer;
  const RegionPtr region = good(reader->allocate_on_gpu(0, kBlock));
  good(reader->send(writer, region->descriptor().encode()));
  const CUstream runs = stream(CU_STREAM_NON_BLOCKING);
  std::optional<Gate> gate;
  while (true) {
    const Completion next = reader.await(tells);
    if (next.kind == Completion::Kind::peer_down) break;
    if (next.data == kHold) {
      gate.emplace(runs);
      good(reader->send(writer, std::string(kHeld)));
    } else {
      gate->open();
    }
  }
  std::this_thread::sleep_for(kAMoment);
  if (gate) gate->open();
  REQUIRE(CU(StreamSynchronize)(runs) == CUDA_SUCCESS);
}

TEST_CASE("the double: a region is closed once another process has closed it") {
  Bench bench;
  bench.borrower.hold();
  auto closing =
      std::async(std::launch::async, [&] { return bench.writer->deregister(bench.source); });
  CHECK(closing.wait_for(kAMoment) == std::future_status::timeout);
  bench.borrower.let_go();
  good(closing.get());
  bench.free_memory();
}

TEST_CASE("the double: a region is closed once another process has, even if it was disconnected") {
  Bench bench;
  bench.borrower.hold();
  bench.writer->disconnect(bench.borrower.id());
  good(bench.writer->deregister(bench.source));
  bench.free_memory();
}

TEST_CASE("the double: an engine is closed once another process has closed its memory") {
  Bench bench;
  bench.borrower.hold();
  bench.writer->close();
  bench.free_memory();
}

TEST_CASE("the double: memory that another process had open is free when that process has died") {
  Bench bench;
  bench.borrower.hold();
  bench.borrower.kill();
  good(bench.writer->deregister(bench.source));
  bench.free_memory();
}

TEST_CASE("the double: another process that is late to close a region is named") {
  Bench bench(std::chrono::milliseconds(500));
  bench.borrower.hold();
  const auto late = bench.writer->deregister(bench.source);
  REQUIRE(!late);
  CHECK(late.error().code == Errc::deadline_exceeded);
  CHECK_MESSAGE(late.error().text.find("'reader'") != std::string::npos, late.error().text);
  bench.borrower.let_go();
  while (!bench.writer->deregister(bench.source)) std::this_thread::sleep_for(kAMoment / 20);
  bench.free_memory();
}

TEST_SUITE_END();
