// Capture and graphs: the calls that a driver forbids meanwhile, and the work that it runs later.
// Cases hold on a GPU, too, unless they say that they are of the double alone.
#include <array>
#include <cstddef>
#include <cstdint>
#include <future>
#include <thread>
#include <utility>

#include "clock.hpp"
#include "doubles/cuda_driver.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

void begin(CUstream on, CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL) {
  REQUIRE(CU(StreamBeginCapture)(on, mode) == CUDA_SUCCESS);
}

CUresult end(CUstream on) {
  CUgraph graph = nullptr;
  const CUresult ended = CU(StreamEndCapture)(on, &graph);
  if (ended == CUDA_SUCCESS) CU(GraphDestroy)(graph);
  return ended;
}

CUstreamCaptureStatus status_of(CUstream of) {
  CUstreamCaptureStatus status{};
  REQUIRE(CU(StreamIsCapturing)(of, &status) == CUDA_SUCCESS);
  return status;
}

// The work captured on a stream, ready to run.
class Executable {
 public:
  explicit Executable(CUstream captured) {
    CUgraph graph = nullptr;
    REQUIRE(CU(StreamEndCapture)(captured, &graph) == CUDA_SUCCESS);
    REQUIRE(CU(GraphInstantiate)(&exec_, graph, 0) == CUDA_SUCCESS);
    REQUIRE(CU(GraphDestroy)(graph) == CUDA_SUCCESS);
  }
  ~Executable() { CU(GraphExecDestroy)(exec_); }
  Executable(const Executable&) = delete;
  Executable& operator=(const Executable&) = delete;

  void launch(CUstream on) const { REQUIRE(CU(GraphLaunch)(exec_, on) == CUDA_SUCCESS); }

 private:
  CUgraphExec exec_ = nullptr;
};

struct Event {
  Event() { REQUIRE(CU(EventCreate)(&handle, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS); }
  ~Event() { CU(EventDestroy)(handle); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(CUstream on) const { REQUIRE(CU(EventRecord)(handle, on) == CUDA_SUCCESS); }
  CUresult hold(CUstream other) const { return CU(StreamWaitEvent)(other, handle, 0); }

  CUevent handle = nullptr;
};

void write(CUstream on, CUdeviceptr word, cuuint64_t value) {
  REQUIRE(CU(StreamWriteValue64)(on, word, value, 0) == CUDA_SUCCESS);
}

// Two streams and words; nothing may be captured when they end.
struct Streams {
  ~Streams() {
    CU(StreamDestroy)(first);
    CU(StreamDestroy)(second);
  }
  CUstream first = stream();
  CUstream second = stream();
  HostWords words;
};

}  // namespace

TEST_SUITE_BEGIN("cuda");

TEST_CASE("captured work runs at each launch of its graph, with the values it had") {
  const CudaDriver driver;
  Streams s;
  begin(s.first);
  CHECK(status_of(s.first) == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CHECK(status_of(s.second) == CU_STREAM_CAPTURE_STATUS_NONE);
  write(s.first, s.words.address(0), 5);
  write(s.first, s.words.address(1), 6);
  const Executable graph(s.first);
  CHECK(status_of(s.first) == CU_STREAM_CAPTURE_STATUS_NONE);
  REQUIRE(CU(CtxSynchronize)() == CUDA_SUCCESS);
  CHECK(s.words[0].load() == 0);
  for (int round = 0; round < 3; ++round) {
    s.words[0].store(0);
    s.words[1].store(0);
    graph.launch(s.second);
    REQUIRE(CU(StreamSynchronize)(s.second) == CUDA_SUCCESS);
    CHECK(s.words[0].load() == 5);
    CHECK(s.words[1].load() == 6);
  }
}

TEST_CASE("a graph runs after earlier work of its stream, and after its own last run") {
  const CudaDriver driver;
  Streams s;
  begin(s.first);
  REQUIRE(CU(StreamWaitValue64)(s.first, s.words.address(0), 1, CU_STREAM_WAIT_VALUE_GEQ) ==
          CUDA_SUCCESS);
  write(s.first, s.words.address(1), 2);
  const Executable graph(s.first);
  graph.launch(s.first);
  graph.launch(s.second);
  write(s.second, s.words.address(2), 3);
  CHECK(CU(StreamQuery)(s.first) == CUDA_ERROR_NOT_READY);
  CHECK(s.words[1].load() == 0);
  CHECK(s.words[2].load() == 0);
  s.words[0].store(1);
  REQUIRE(CU(StreamSynchronize)(s.second) == CUDA_SUCCESS);
  CHECK(CU(StreamQuery)(s.first) == CUDA_SUCCESS);
  CHECK(s.words[2].load() == 3);
}

TEST_CASE("two instances of a graph run side by side, each from its beginning") {
  const CudaDriver driver;
  Streams s;
  std::array<CUstreamBatchMemOpParams, 2> batch{};
  batch[0].writeValue = {CU_STREAM_MEM_OP_WRITE_VALUE_32, s.words.address(1), {1}, 0, 0};
  batch[1].waitValue = {
      CU_STREAM_MEM_OP_WAIT_VALUE_32, s.words.address(0), {1}, CU_STREAM_WAIT_VALUE_GEQ, 0};
  begin(s.first);
  REQUIRE(CU(StreamBatchMemOp)(s.first, 2, batch.data(), 0) == CUDA_SUCCESS);
  CUgraph graph = nullptr;
  REQUIRE(CU(StreamEndCapture)(s.first, &graph) == CUDA_SUCCESS);
  std::array<CUgraphExec, 2> instances{};
  for (CUgraphExec& instance : instances) {
    REQUIRE(CU(GraphInstantiate)(&instance, graph, 0) == CUDA_SUCCESS);
  }
  REQUIRE(CU(GraphDestroy)(graph) == CUDA_SUCCESS);
  for (const auto& [instance, on] :
       {std::pair{instances[0], s.first}, std::pair{instances[1], s.second}}) {
    s.words[1].store(0);
    REQUIRE(CU(GraphLaunch)(instance, on) == CUDA_SUCCESS);
    const std::uint64_t deadline = now_ns() + static_cast<std::uint64_t>(kDeadline.count());
    while (s.words[1].load() == 0 && now_ns() < deadline) std::this_thread::yield();
    CHECK(s.words[1].load() == 1);
  }
  s.words[0].store(1);
  REQUIRE(CU(CtxSynchronize)() == CUDA_SUCCESS);
  for (CUgraphExec instance : instances) CHECK(CU(GraphExecDestroy)(instance) == CUDA_SUCCESS);
}

TEST_CASE("a stream that waits for an event of a capture is captured with it") {
  const CudaDriver driver;
  Streams s;
  const Event forked;
  const Event joined;
  const Event copied;
  const CUdeviceptr memory = allocate(2 * kBytes);
  fill(memory, 1, 2 * kBytes);
  begin(s.first);
  REQUIRE(CU(MemsetD8Async)(memory, 7, kBytes, s.first) == CUDA_SUCCESS);
  forked.record(s.first);
  REQUIRE(forked.hold(s.second) == CUDA_SUCCESS);
  CHECK(status_of(s.second) == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  REQUIRE(CU(MemcpyDtoDAsync)(memory + kBytes, memory, kBytes, s.second) == CUDA_SUCCESS);
  joined.record(s.second);
  REQUIRE(joined.hold(s.first) == CUDA_SUCCESS);
  write(s.first, s.words.address(0), 9);
  const Executable graph(s.first);
  CHECK(first_byte(memory) == 1);
  for (int round = 0; round < 20; ++round) {
    fill(memory, 1, 2 * kBytes);
    s.words[0].store(0);
    graph.launch(s.first);
    REQUIRE(CU(StreamSynchronize)(s.first) == CUDA_SUCCESS);
    CHECK(first_byte(memory + kBytes) == 7);
    CHECK(s.words[0].load() == 9);
  }
  CU(MemFree)(memory);
}

TEST_CASE("a capture ends on the stream where it began, with all streams it captured") {
  const CudaDriver driver;
  Streams s;
  const Event forked;
  begin(s.first);
  forked.record(s.first);
  REQUIRE(forked.hold(s.second) == CUDA_SUCCESS);
  write(s.second, s.words.address(0), 1);
  SUBCASE("another stream ends it") {
    CHECK(end(s.second) == CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    CHECK(end(s.first) != CUDA_SUCCESS);
  }
  SUBCASE("a captured stream has not been joined") {
    CHECK(end(s.first) == CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  }
  SUBCASE("another thread ends it") {
    std::async(std::launch::async, [&] {
      REQUIRE(CU(CtxPushCurrent)(driver.context()) == CUDA_SUCCESS);
      CHECK(end(s.first) != CUDA_SUCCESS);  // drivers differ in the code
    }).get();
    CHECK(end(s.first) != CUDA_SUCCESS);
  }
  CHECK(status_of(s.first) == CU_STREAM_CAPTURE_STATUS_NONE);
  CHECK(status_of(s.second) == CU_STREAM_CAPTURE_STATUS_NONE);
}

TEST_CASE("an event does not cross the boundary of a capture") {
  const CudaDriver driver;
  Streams s;
  const Event outside;
  const Event inside;
  outside.record(s.second);
  begin(s.first);
  SUBCASE("into it") {
    CHECK(outside.hold(s.first) == CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    CHECK(status_of(s.first) == CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    CHECK(end(s.first) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
  SUBCASE("out of it") {
    inside.record(s.first);
    CHECK(CU(EventQuery)(inside.handle) != CUDA_SUCCESS);
    CHECK(CU(EventSynchronize)(inside.handle) != CUDA_SUCCESS);
    end(s.first);
  }
  SUBCASE("into another one") {
    begin(s.second);
    inside.record(s.first);
    CHECK(inside.hold(s.second) == CUDA_ERROR_STREAM_CAPTURE_MERGE);
    CHECK(end(s.first) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(end(s.second) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
}

TEST_CASE("a call that waits for a captured stream invalidates the capture") {
  const CudaDriver driver;
  Streams s;
  for (const bool wait : {false, true}) {
    CAPTURE(wait);
    begin(s.first);
    CHECK((wait ? CU(StreamSynchronize)(s.first) : CU(StreamQuery)(s.first)) ==
          CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(CU(StreamWriteValue64)(s.first, s.words.address(0), 1, 0) ==
          CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(end(s.first) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
  begin(s.first);
  CHECK(CU(StreamBeginCapture)(s.first, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_ERROR_ILLEGAL_STATE);
  end(s.first);
  CHECK(CU(StreamBeginCapture)(nullptr, CU_STREAM_CAPTURE_MODE_GLOBAL) ==
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CHECK(end(s.first) == CUDA_ERROR_ILLEGAL_STATE);
}

TEST_CASE("the legacy stream cannot be used while a stream that it is ordered with is captured") {
  const CudaDriver driver;
  HostWords words;
  const CUstream blocking = stream(CU_STREAM_DEFAULT);
  begin(blocking, CU_STREAM_CAPTURE_MODE_RELAXED);
  CHECK(CU(StreamWriteValue64)(nullptr, words.address(0), 1, 0) ==
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  CHECK(end(blocking) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CU(StreamDestroy)(blocking);
}

// An engine's thread must know this: the capture of another thread forbids it to query an event.
TEST_CASE("a capture forbids unsafe calls, to other threads too, unless these are relaxed") {
  const CudaDriver driver;
  Streams s;
  const Event event;
  event.record(s.second);
  REQUIRE(CU(StreamSynchronize)(s.second) == CUDA_SUCCESS);
  const auto query_elsewhere = [&](CUstreamCaptureMode mode) {
    return std::async(std::launch::async,
                      [&] {
                        REQUIRE(CU(CtxPushCurrent)(driver.context()) == CUDA_SUCCESS);
                        REQUIRE(CU(ThreadExchangeStreamCaptureMode)(&mode) == CUDA_SUCCESS);
                        CHECK(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
                        return CU(EventQuery)(event.handle);
                      })
        .get();
  };
  struct Try {
    CUstreamCaptureMode capture;
    CUstreamCaptureMode thread;
    bool allowed;
  };
  for (const auto& [capture, thread, allowed] :
       {Try{CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_GLOBAL, false},
        Try{CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, true},
        Try{CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED, true},
        Try{CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_GLOBAL, true},
        Try{CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_GLOBAL, true}}) {
    CAPTURE(capture);
    CAPTURE(thread);
    begin(s.first, capture);
    write(s.first, s.words.address(0), 1);
    CHECK(query_elsewhere(thread) ==
          (allowed ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    CHECK(end(s.first) == (allowed ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
  }
  begin(s.first, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  CUdeviceptr memory = 0;
  CHECK(CU(MemAlloc)(&memory, kBytes) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CHECK(end(s.first) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

TEST_CASE("the double: pageable memory is not captured") {
  const CudaDriver driver;
  Streams s;
  const CUdeviceptr memory = allocate(kBytes);
  char byte = 0;
  begin(s.first);
  CHECK(CU(MemcpyHtoDAsync)(memory, &byte, 1, s.first) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CHECK(end(s.first) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CU(MemFree)(memory);
}

TEST_CASE("a batch of operations on words runs in its order, captured or not") {
  const CudaDriver driver;
  Streams s;
  std::array<CUstreamBatchMemOpParams, 3> batch{};
  batch[0].waitValue = {
      CU_STREAM_MEM_OP_WAIT_VALUE_32, s.words.address(0), {1}, CU_STREAM_WAIT_VALUE_GEQ, 0};
  batch[1].writeValue = {CU_STREAM_MEM_OP_WRITE_VALUE_32, s.words.address(1), {2}, 0, 0};
  batch[2].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  batch[2].writeValue.address = s.words.address(2);
  batch[2].writeValue.value64 = 3;
  const auto enqueue = [&] {
    REQUIRE(CU(StreamBatchMemOp)(s.first, 3, batch.data(), 0) == CUDA_SUCCESS);
  };
  begin(s.first);
  enqueue();
  const Executable graph(s.first);
  for (const bool captured : {false, true, true}) {
    CAPTURE(captured);
    for (std::size_t i = 0; i < 3; ++i) s.words[i].store(0);
    if (captured) {
      graph.launch(s.first);
    } else {
      enqueue();
    }
    CHECK(CU(StreamQuery)(s.first) == CUDA_ERROR_NOT_READY);
    CHECK(s.words[1].load() == 0);
    s.words[0].store(1);
    REQUIRE(CU(StreamSynchronize)(s.first) == CUDA_SUCCESS);
    CHECK(s.words[1].load() == 2);
    CHECK(s.words[2].load() == 3);
  }
  batch[1].writeValue.address += 2;
  CHECK(CU(StreamBatchMemOp)(s.first, 3, batch.data(), 0) == CUDA_ERROR_INVALID_VALUE);
}

TEST_SUITE_END();
