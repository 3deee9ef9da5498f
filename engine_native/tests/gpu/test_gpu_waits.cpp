// Waits for a GPU do not block the engine thread. Mostly on the double alone, as real drivers
// differ in what waits for what.
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "doubles/cuda_driver.hpp"
#include "gpu/gpu_memory.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

constexpr std::size_t kTaken = 256 * 1024;

// Sets a variable of the environment while it exists.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Environment() { ::unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
};

// Launches the kernel for the first time, which holds the context's lock until all streams that
// `on` waits for have ended their work.
std::future<CUresult> begin_loading(const CudaDriver& driver, NewKernel& kernel, CUstream on) {
  auto loading = std::async(std::launch::async, [&driver, &kernel, on] {
    REQUIRE(CU(CtxPushCurrent)(driver.context()) == CUDA_SUCCESS);
    return kernel.launch(on);
  });
  while (DOUBLE(holding)() == 0) std::this_thread::yield();
  return loading;
}

}  // namespace

TEST_SUITE_BEGIN("cuda");

TEST_CASE("the double: an engine works while a kernel is loaded and a stream waits") {
  const CudaDriver driver;
  for (const std::string fabric : {"local", "tcp"}) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const CUstream compute = stream();
    {
      const Memory from(pair.writer, true, kTaken);
      const Memory to(pair.reader, true, kTaken);
      const Memory host_from(pair.writer, false, kTaken);
      const Memory host_to(pair.reader, false, kTaken);
      from.write(Bytes(kTaken, std::byte{5}));
      // Both have copied once.
      write_and_count(pair.writer, pair.to_reader, pair.reader, from.region(), to.region(),
                      {0, 0, kTaken});
      NewKernel kernel;
      Gate gate(compute);
      auto loading = begin_loading(driver, kernel, compute);
      const auto copied = good(pair.writer->write(pair.to_reader, from.region(),
                                                  to.region()->descriptor(), {0, 0, kTaken}));
      host_from.write(Bytes(kTaken, std::byte{7}));
      for (int i = 0; i < 20; ++i) {
        // Sends in the other direction, as messages in this one wait behind the first write.
        good(pair.reader->send(pair.to_writer, "ping"));
        pair.writer.await(Kind::message);
        good(pair.writer->send(pair.to_reader, "pong"));
        pair.reader.await(Kind::message);
      }
      gate.open();
      CHECK(loading.get() == CUDA_SUCCESS);
      CHECK(pair.writer.await(Kind::write, copied.id).code == Errc::ok);
      CHECK(to.read() == Bytes(kTaken, std::byte{5}));
    }
    CU(StreamDestroy)(compute);
  }
}

TEST_CASE("the double: a GPU that takes no bytes for a long time costs its engine no peer") {
  constexpr Duration kTimeout = std::chrono::milliseconds(300);
  constexpr std::size_t kMuch = std::size_t{96} << 20;  // more than staging and sockets take
  const CudaDriver driver;
  auto options = options_for("tcp", "writer");
  options.tuning.window_bytes = kMuch;
  options.peer_timeout = kTimeout;
  TestEngine writer(options);
  TestEngine reader(options_for("tcp", "reader"));
  const PeerId to_reader = writer.connect_to(reader);
  const CUstream compute = stream();
  {
    const Memory from(writer, false, kMuch);
    const Memory to(reader, true, kMuch);
    NewKernel kernel;
    Gate gate(compute);
    auto loading = begin_loading(driver, kernel, compute);
    const auto copied = good(writer->write(to_reader, from.region(), to.region()->descriptor(),
                                           {0, 0, kMuch}, {.timeout = kDeadline}));
    std::this_thread::sleep_for(4 * kTimeout);
    gate.open();
    CHECK(loading.get() == CUDA_SUCCESS);
    const Completion ended = writer.await(Kind::write, copied.id);
    CHECK_MESSAGE(ended.code == Errc::ok, ended.text);
  }
  CU(StreamDestroy)(compute);
}

TEST_CASE("the double: a stream that waits for a counter continues while a kernel is loaded") {
  const CudaDriver driver;
  Pair pair("local");
  const CUstream compute = stream();
  {
    const Memory from(pair.writer, true, kTaken);
    const Memory to(pair.reader, true, kTaken);
    const Memory host_from(pair.writer, false, kTaken);
    const Memory host_to(pair.reader, false, kTaken);
    write_and_count(pair.writer, pair.to_reader, pair.reader, from.region(), to.region(),
                    {0, 0, kTaken});
    NewKernel kernel;
    const Imm imm = good(pair.reader->allocate_counter());
    const auto wait = good(pair.reader->wait_on_stream(0, compute, imm, 1, kDeadline));
    auto loading = begin_loading(driver, kernel, compute);
    // This is the reader's copy; the reader's thread has to write the word that the stream waits
    // for.
    const auto copied = good(pair.reader->write(pair.to_writer, to.region(),
                                                from.region()->descriptor(), {0, 0, kTaken}));
    const auto counted =
        good(pair.writer->write(pair.to_reader, host_from.region(), host_to.region()->descriptor(),
                                {0, 0, kTaken}, {.imm = imm}));
    CHECK(loading.get() == CUDA_SUCCESS);
    CHECK(good(wait->reached()));
    CHECK(pair.writer.await(Kind::write, counted.id).code == Errc::ok);
    CHECK(pair.reader.await(Kind::write, copied.id).code == Errc::ok);
    pair.reader->release_counter(imm);
  }
  CU(StreamDestroy)(compute);
}

TEST_CASE("a stream waits for bytes that its GPU copies, with one hardware queue for all") {
  const Environment one("CUDA_DEVICE_MAX_CONNECTIONS", "1");
  const CudaDriver driver;
  for (const std::string fabric : {"local", "tcp"}) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const CUstream compute = stream();
    {
      const Memory from(pair.writer, true, kTaken);
      const Memory to(pair.reader, true, kTaken);
      const Imm imm = good(pair.reader->allocate_counter());
      const auto wait = good(pair.reader->wait_on_stream(0, compute, imm, 1, kDeadline));
      const auto copied =
          good(pair.writer->write(pair.to_reader, from.region(), to.region()->descriptor(),
                                  {0, 0, kTaken}, {.imm = imm, .timeout = kDeadline}));
      CHECK(pair.writer.await(Kind::write, copied.id).code == Errc::ok);
      REQUIRE(CU(StreamSynchronize)(compute) == CUDA_SUCCESS);
      CHECK(good(wait->reached()));
      pair.reader->release_counter(imm);
    }
    CU(StreamDestroy)(compute);
  }
}

TEST_CASE("the double: the end of an engine, and of its words, waits for no stream") {
  const CudaDriver driver;
  const CUstream compute = stream();
  HostWords bytes;
  auto engine = std::make_unique<TestEngine>(options_for("tcp", "engine"));
  auto word = good((*engine)->stream_word(0));
  Gate gate(compute);
  (*engine)->close();
  word.reset();
  engine.reset();
  // The context's lock is not held either.
  CHECK(CU(StreamQuery)(compute) == CUDA_ERROR_NOT_READY);
  CHECK(DOUBLE(holding)() == 0);
  gate.open();
  CHECK(CU(StreamSynchronize)(compute) == CUDA_SUCCESS);
  CU(StreamDestroy)(compute);
}

TEST_CASE("a word is not reused before a stream has made all its additions") {
  const CudaDriver driver;
  TestEngine engine(options_for("tcp", "engine"));
  const CUstream compute = stream();
  auto late = good(engine->stream_word(0));
  Gate gate(compute);
  good(late->add_on(compute, 3));
  const auto* const at = late->word().get();
  late.reset();
  const auto other = good(engine->stream_word(0));
  CHECK(other->word().get() != at);
  gate.open();
  REQUIRE(CU(StreamSynchronize)(compute) == CUDA_SUCCESS);
  const auto again = good(engine->stream_word(0));
  CHECK(again->word().get() == at);
  CHECK(again->word()->value == 0);
  good(again->add_on(compute, 2));
  REQUIRE(CU(StreamSynchronize)(compute) == CUDA_SUCCESS);
  CHECK(again->word()->value == 2);
  CU(StreamDestroy)(compute);
}

TEST_CASE("the double: the error names what a GPU lacks for the engine") {
  const CudaDriver driver;
  const auto lacks = [](const auto& refused, const char* what) {
    REQUIRE(!refused);
    CHECK(refused.error().code == Errc::fabric_unavailable);
    CHECK_MESSAGE(refused.error().text.find(what) != std::string::npos, refused.error().text);
  };
  const CUdevice_attribute pointers = CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
  const CUdevice_attribute words = CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS;
  {
    DOUBLE(attribute)(pointers, 0);
    TestEngine engine(options_for("tcp", "engine"));
    lacks(engine->allocate_on_gpu(0, kTaken), "memory of the host");
    DOUBLE(attribute)(pointers, -1);
  }
  DOUBLE(attribute)(words, 0);
  TestEngine engine(options_for("tcp", "engine"));
  const CUstream compute = stream();
  const Imm imm = good(engine->allocate_counter());
  lacks(engine->wait_on_stream(0, compute, imm, 1, kDeadline), "let a thread wait");
  CU(StreamDestroy)(compute);
  DOUBLE(attribute)(words, -1);
}

TEST_CASE("the double: a GPU is lost with its context, even if another program had the fault") {
  for (const bool by_mps : {true, false}) {
    CAPTURE(by_mps);
    DOUBLE(same_handles)(true);
    const CudaDriver driver;
    Pair pair("local");
    const RegionPtr from = good(pair.writer->allocate_on_gpu(0, kTaken));
    const RegionPtr to = good(pair.reader->allocate_on_gpu(0, kTaken));
    write_and_count(pair.writer, pair.to_reader, pair.reader, from, to, {0, 0, kTaken});
    CUcontext again = nullptr;
    if (by_mps) {
      DOUBLE(mps_fault)(0);
    } else {
      REQUIRE(CU(DevicePrimaryCtxReset)(0) == CUDA_SUCCESS);
      REQUIRE(CU(DevicePrimaryCtxRetain)(&again, 0) == CUDA_SUCCESS);
      CHECK(again == driver.context());
    }
    const auto lost =
        good(pair.writer->write(pair.to_reader, from, to->descriptor(), {0, 0, kTaken}));
    const auto ended = pair.writer.await(Kind::write, lost.id);
    CHECK(ended.code == Errc::gpu_lost);
    CHECK_MESSAGE(ended.text.find("GPU 0") != std::string::npos, ended.text);
    good(pair.writer->deregister(from));
    good(pair.reader->deregister(to));
    pair.writer->close();
    pair.reader->close();
    if (again) CU(DevicePrimaryCtxRelease)(0);
    CU(DevicePrimaryCtxReset)(0);
    DOUBLE(same_handles)(false);
  }
}

TEST_SUITE_END();
