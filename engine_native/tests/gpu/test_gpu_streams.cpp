// Order between transfers and streams of a GPU, on the double of a driver or on a GPU.
#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "doubles/cuda_driver.hpp"
#include "gpu/gpu_memory.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

TEST_SUITE_BEGIN("cuda");

namespace {

constexpr std::size_t kSize = 256 * 1024;

// A stream, a region of GPU 0 at each of two engines, and the writes from one to the other.
struct Ordered {
  explicit Ordered(const std::string& fabric) : pair(fabric) {}
  ~Ordered() {
    CU(StreamDestroy)(compute);
    good(pair.writer->deregister(source));
    good(pair.reader->deregister(destination));
  }
  Ordered(const Ordered&) = delete;
  Ordered& operator=(const Ordered&) = delete;

  Submitted write(Imm imm, const WatchFor& after = {}) {
    return good(pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                   {.length = kSize},
                                   {.imm = imm, .timeout = kDeadline, .after = after}));
  }
  std::shared_ptr<StreamWait> wait(Imm imm, std::uint64_t total, Duration timeout = kDeadline) {
    return good(pair.reader->wait_on_stream(0, compute, imm, total, timeout));
  }
  void synchronize() const { REQUIRE(CU(StreamSynchronize)(compute) == CUDA_SUCCESS); }

  Pair pair;
  CUstream compute = stream();
  RegionPtr source = good(pair.writer->allocate_on_gpu(0, kSize));
  RegionPtr destination = good(pair.reader->allocate_on_gpu(0, kSize));
};

void set(CUstream on, const RegionPtr& region, int value) {
  REQUIRE(CU(MemsetD8Async)(region->address(), static_cast<unsigned char>(value), kSize, on) ==
          CUDA_SUCCESS);
}

// True if all bytes have this value.
bool filled(const RegionPtr& region, int value) {
  std::vector<std::byte> bytes(kSize);
  REQUIRE(CU(MemcpyDtoH)(bytes.data(), region->address(), kSize) == CUDA_SUCCESS);
  return std::all_of(bytes.begin(), bytes.end(),
                     [value](std::byte byte) { return byte == static_cast<std::byte>(value); });
}

}  // namespace

TEST_CASE("a write that waits for a stream moves what the stream had written before") {
  const CudaDriver driver;
  for (const char* fabric : {"local", "tcp"}) {
    CAPTURE(fabric);
    Ordered o(fabric);
    const auto word = good(o.pair.writer->stream_word(0));
    for (int round = 1; round <= 20; ++round) {
      CAPTURE(round);
      const Imm imm = good(o.pair.reader->allocate_counter());
      const auto submitted =
          o.write(imm, {.word = word->word(), .value = static_cast<std::uint64_t>(round)});
      Gate gate(o.compute);
      set(o.compute, o.source, round);
      good(word->add_on(o.compute, 1));
      CHECK(o.pair.reader->counter_value(imm) == 0);
      gate.open();
      good(o.pair.reader->expect(imm, submitted.immediates));
      CHECK(o.pair.reader.await(Kind::counter, imm).code == Errc::ok);
      CHECK(filled(o.destination, round));
      CHECK(o.pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
      o.synchronize();
      o.pair.reader->release_counter(imm);
    }
  }
}

TEST_CASE("a graph starts a write at each of its runs") {
  const CudaDriver driver;
  Ordered o("local");
  const auto word = good(o.pair.writer->stream_word(0));
  REQUIRE(CU(StreamBeginCapture)(o.compute, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
  set(o.compute, o.source, 7);
  good(word->add_on(o.compute, 2));
  CUgraph graph = nullptr;
  REQUIRE(CU(StreamEndCapture)(o.compute, &graph) == CUDA_SUCCESS);
  CUgraphExec run = nullptr;
  REQUIRE(CU(GraphInstantiate)(&run, graph, 0) == CUDA_SUCCESS);
  REQUIRE(CU(GraphDestroy)(graph) == CUDA_SUCCESS);
  CHECK(word->word()->value == 0);
  for (std::uint64_t round = 1; round <= 5; ++round) {
    set(o.compute, o.source, 1);
    o.synchronize();
    const Imm imm = good(o.pair.reader->allocate_counter());
    const auto submitted = o.write(imm, {.word = word->word(), .value = 2 * round});
    REQUIRE(CU(GraphLaunch)(run, o.compute) == CUDA_SUCCESS);
    good(o.pair.reader->expect(imm, submitted.immediates));
    CHECK(o.pair.reader.await(Kind::counter, imm).code == Errc::ok);
    CHECK(filled(o.destination, 7));
    CHECK(o.pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
    o.pair.reader->release_counter(imm);
  }
  o.synchronize();
  CHECK(word->word()->value == 10);
  CU(GraphExecDestroy)(run);
}

TEST_CASE("a stream that waits for a counter reads what has arrived") {
  const CudaDriver driver;
  for (const char* fabric : {"local", "tcp"}) {
    CAPTURE(fabric);
    Ordered o(fabric);
    const RegionPtr seen = good(o.pair.reader->allocate_on_gpu(0, kSize));
    for (int round = 1; round <= 20; ++round) {
      CAPTURE(round);
      const Imm imm = good(o.pair.reader->allocate_counter());
      set(o.compute, o.source, round);
      o.synchronize();
      std::uint64_t total = 1;
      std::shared_ptr<StreamWait> wait;
      const bool early = round % 2 == 0;  // the stream waits before the bytes arrive
      if (early) wait = o.wait(imm, total);
      const auto submitted = o.write(imm);
      REQUIRE(submitted.immediates == total);
      if (!early) wait = o.wait(imm, total);
      REQUIRE(CU(MemcpyDtoDAsync)(seen->address(), o.destination->address(), kSize, o.compute) ==
              CUDA_SUCCESS);
      o.synchronize();
      CHECK(good(wait->reached()));
      CHECK((wait->word().load() & 0xff) == 1);
      CHECK(filled(seen, round));
      CHECK(o.pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
      o.pair.reader->release_counter(imm);
    }
    good(o.pair.reader->deregister(seen));
  }
}

TEST_CASE("a stream continues if what it waits for cannot come, and the wait says why") {
  const CudaDriver driver;
  Ordered o("local");
  const auto ended = [&](const StreamWait& wait) {
    o.synchronize();
    const auto reached = wait.reached();
    REQUIRE(!reached);
    CHECK((wait.word().load() & 0xff) == 1 + static_cast<std::uint64_t>(reached.error().code));
    return reached.error().code;
  };
  const Imm released = good(o.pair.reader->allocate_counter());
  const auto of_released = o.wait(released, 1);
  CHECK(!good(of_released->reached()));
  CHECK(CU(StreamQuery)(o.compute) == CUDA_ERROR_NOT_READY);
  o.pair.reader->release_counter(released);
  CHECK(ended(*of_released) == Errc::stale_counter);
  CHECK(ended(*o.wait(released, 1)) == Errc::stale_counter);

  const Imm late = good(o.pair.reader->allocate_counter());
  CHECK(ended(*o.wait(late, 1, std::chrono::milliseconds(30))) == Errc::deadline_exceeded);

  const auto two = o.write(late);
  CHECK(o.pair.writer.await(Kind::write, two.id).code == Errc::ok);
  CHECK(ended(*o.wait(late, 0)) == Errc::protocol_error);

  const auto of_closed = o.wait(late, 2);
  o.pair.reader->close();
  CHECK(ended(*of_closed) == Errc::engine_closed);
  CHECK(ended(*o.wait(late, 2)) == Errc::engine_closed);
}

TEST_CASE("a stream that reaches its waits late passes them, even if their words are used again") {
  const CudaDriver driver;
  Ordered o("local");
  const Imm imm = good(o.pair.reader->allocate_counter());
  // Both streams together wait more often than there are words, so all are used again; one waits
  // less often.
  const std::array<CUstream, 2> late{o.compute, stream()};
  HostWords gate;
  for (CUstream each : late) {
    REQUIRE(CU(StreamWaitValue64)(each, gate.address(0), 1, CU_STREAM_WAIT_VALUE_GEQ) ==
            CUDA_SUCCESS);
  }
  for (std::size_t i = 0; i < 1500; ++i) {
    const auto wait =
        good(o.pair.reader->wait_on_stream(0, late[i % late.size()], imm, 0, kDeadline));
    while (!good(wait->reached())) std::this_thread::yield();
  }
  gate[0].store(1);
  for (CUstream each : late) REQUIRE(CU(StreamSynchronize)(each) == CUDA_SUCCESS);
  CU(StreamDestroy)(late[1]);
}

TEST_CASE("transfers do not break a capture that runs meanwhile on another thread") {
  const CudaDriver driver;
  for (const char* fabric : {"local", "tcp"}) {
    CAPTURE(fabric);
    Ordered o(fabric);
    const Imm imm = good(o.pair.reader->allocate_counter());
    REQUIRE(CU(StreamBeginCapture)(o.compute, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
    set(o.compute, o.source, 1);
    const auto submitted = o.write(imm);
    CHECK(o.pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
    CUgraph graph = nullptr;
    REQUIRE(CU(StreamEndCapture)(o.compute, &graph) == CUDA_SUCCESS);
    CU(GraphDestroy)(graph);
  }
}

TEST_CASE("the error for a wait that cannot be queued says why") {
  const CudaDriver driver;
  Ordered o("local");
  const Imm imm = good(o.pair.reader->allocate_counter());
  CHECK(o.pair.reader->stream_word(99).error().code == Errc::invalid_argument);
  CHECK(o.pair.reader->wait_on_stream(99, o.compute, imm, 1, kDeadline).error().code ==
        Errc::invalid_argument);
  REQUIRE(CU(StreamBeginCapture)(o.compute, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
  CHECK(o.pair.reader->wait_on_stream(0, o.compute, imm, 1, kDeadline).error().code ==
        Errc::invalid_argument);
  CUgraph graph = nullptr;
  REQUIRE(CU(StreamEndCapture)(o.compute, &graph) == CUDA_SUCCESS);  // the capture is still valid
  CU(GraphDestroy)(graph);
  std::vector<std::shared_ptr<StreamWait>> waits;
  Result<std::shared_ptr<StreamWait>> last = Error{};
  while ((last = o.pair.reader->wait_on_stream(0, o.compute, imm, 1, kDeadline))) {
    waits.push_back(*last);
  }
  CHECK(last.error().code == Errc::backpressure);
  CHECK(waits.size() == 1024);
  o.pair.reader->release_counter(imm);
  o.synchronize();
}

TEST_CASE("a mirror follows its counter, after the counted bytes have landed, and shows its end") {
  const CudaDriver driver;
  for (const std::string& fabric : gpu_fabrics()) {
    CAPTURE(fabric);
    Ordered o(fabric);
    const RegionPtr seen = good(o.pair.reader->allocate_on_gpu(0, kSize));
    const Imm imm = good(o.pair.reader->allocate_counter());
    const auto mirror = good(o.pair.reader->mirror_counter(0, imm));
    const auto address = reinterpret_cast<CUdeviceptr>(&mirror->word());
    std::uint64_t count = 0;
    for (int round = 1; round <= 10; ++round) {
      CAPTURE(round);
      CHECK(mirror->word().load() == (count << 8));
      fill(o.source->address(), round, kSize);
      const auto submitted = o.write(imm);
      count += submitted.immediates;
      REQUIRE(CU(StreamWaitValue64)(o.compute, address, count << 8, CU_STREAM_WAIT_VALUE_GEQ) ==
              CUDA_SUCCESS);
      REQUIRE(CU(MemcpyDtoDAsync)(seen->address(), o.destination->address(), kSize, o.compute) ==
              CUDA_SUCCESS);
      o.synchronize();
      CHECK(filled(seen, round));
      CHECK(o.pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
    }
    const auto at_its_end = good(o.pair.reader->mirror_counter(0, imm));
    const auto ended = [&](const CounterMirror& of, Errc code) {
      while ((of.word() & 0xff) == 0) std::this_thread::yield();
      CHECK((of.word() & 0xff) == 1 + static_cast<std::uint64_t>(code));
      CHECK((of.word() >> 8) == count);
    };
    while (at_its_end->word() != count << 8) std::this_thread::yield();
    o.pair.reader->release_counter(imm);
    ended(*mirror, Errc::stale_counter);
    ended(*at_its_end, Errc::stale_counter);
    const Imm last = good(o.pair.reader->allocate_counter());
    const auto closed = good(o.pair.reader->mirror_counter(0, last));
    count = 0;
    good(o.pair.reader->deregister(seen));
    o.pair.reader->close();
    ended(*closed, Errc::engine_closed);
  }
}

TEST_SUITE_END();
