// Waits in the double of a CUDA driver: locks, hardware queues, and other rules that an engine
// meets rarely (cuda_double.hpp has their sources).
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "doubles/cuda_driver.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

constexpr const char* kPipe = "KVXFER_TEST_PIPE";

void until(const std::function<bool()>& holds) {
  while (!holds()) std::this_thread::yield();
}

std::future<CUresult> elsewhere(const CudaDriver& driver, std::function<CUresult()> call) {
  return std::async(std::launch::async, [&driver, call = std::move(call)] {
    CU(CtxPushCurrent)(driver.context());
    return call();
  });
}

}  // namespace

TEST_SUITE_BEGIN("cuda");

TEST_CASE(
    "the double: a call that waits for all streams holds the lock that other calls wait for") {
  const CudaDriver driver;
  const CUstream waits = stream();
  const CUstream other = stream();
  NewKernel kernel;
  HostWords gate;
  HostWords pinned;
  CUdeviceptr memory = allocate(kBytes);
  std::array<std::byte, kBytes> host{};
  CUmodule module = nullptr;
  CUdeviceptr made = 0;
  const std::vector<std::function<CUresult()>> holders{
      [&] { return kernel.launch(other); },
      [&] { return CU(MemAlloc)(&made, kBytes); },
      [&] { return CU(MemFree)(made); },
      [&] { return CU(MemHostRegister)(host.data(), host.size(), 0); },
      [&] { return CU(MemHostUnregister)(host.data()); },
      [&] { return CU(ModuleLoadData)(&module, ".version 7.0\n.target sm_80\n"); },
      [&] { return CU(ModuleUnload)(module); }};
  CUevent event = nullptr;
  REQUIRE(CU(EventCreate)(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
  REQUIRE(CU(EventRecord)(event, other) == CUDA_SUCCESS);
  std::uint64_t opened = 0;
  for (const auto& holder : holders) {
    const std::vector<std::function<CUresult()>> callers{
        [&] { return CU(EventQuery)(event); }, [&] { return CU(StreamQuery)(other); },
        [&] { return CU(MemsetD8Async)(memory, 1, kBytes, other); },
        [&] { return kernel.launch(other); }};
    REQUIRE(CU(StreamWaitValue64)(waits, gate.address(0), ++opened, CU_STREAM_WAIT_VALUE_GEQ) ==
            CUDA_SUCCESS);
    auto holding = elsewhere(driver, holder);
    until([] { return DOUBLE(holding)() == 1; });
    std::vector<std::future<CUresult>> waiting;
    for (const auto& caller : callers) {
      waiting.push_back(elsewhere(driver, [&gate, opened, &caller] {
        const CUresult result = caller();
        CHECK(gate[0].load() == opened);
        return result;
      }));
    }
    for (int i = 0; i < 200; ++i) std::this_thread::yield();
    gate[0].store(opened);
    CHECK(holding.get() == CUDA_SUCCESS);
    for (auto& each : waiting) {
      const CUresult result = each.get();
      CHECK((result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY));
    }
    REQUIRE(CU(CtxSynchronize)() == CUDA_SUCCESS);
  }
  CU(EventDestroy)(event);
  CU(MemFree)(memory);
  CU(StreamDestroy)(waits);
  CU(StreamDestroy)(other);
}

TEST_CASE("the double: a kernel that was loaded before or eagerly waits for no stream") {
  const CudaDriver driver;
  const CUstream waits = stream();
  const CUstream other = stream();
  NewKernel before;
  NewKernel eager;
  REQUIRE(before.launch(other) == CUDA_SUCCESS);
  Gate gate(waits);
  CHECK(before.launch(other) == CUDA_SUCCESS);
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  CHECK(eager.launch(other) == CUDA_SUCCESS);
  ::unsetenv("CUDA_MODULE_LOADING");
  REQUIRE(CU(StreamSynchronize)(other) == CUDA_SUCCESS);
  CHECK(CU(StreamQuery)(waits) == CUDA_ERROR_NOT_READY);
  gate.open();
  REQUIRE(CU(StreamSynchronize)(waits) == CUDA_SUCCESS);
  CU(StreamDestroy)(waits);
  CU(StreamDestroy)(other);
}

TEST_CASE(
    "the double: a waiting stream delays others of its queue, but not those of high priority") {
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  const CudaDriver driver;
  ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const CUstream waits = stream();
  const CUstream other = stream();
  int least = 0;
  int highest = 0;
  REQUIRE(CU(CtxGetStreamPriorityRange)(&least, &highest) == CUDA_SUCCESS);
  CUstream urgent = nullptr;
  REQUIRE(CU(StreamCreateWithPriority)(&urgent, CU_STREAM_NON_BLOCKING, highest) == CUDA_SUCCESS);
  HostWords words;
  const auto write = [&](CUstream on, std::size_t word) {
    REQUIRE(CU(StreamWriteValue64)(on, words.address(word), 1, 0) == CUDA_SUCCESS);
  };
  write(other, 1);  // is done before the wait
  REQUIRE(CU(StreamSynchronize)(other) == CUDA_SUCCESS);
  REQUIRE(CU(StreamWaitValue64)(waits, words.address(0), 1, CU_STREAM_WAIT_VALUE_GEQ) ==
          CUDA_SUCCESS);
  write(other, 2);
  write(urgent, 3);
  REQUIRE(CU(StreamSynchronize)(urgent) == CUDA_SUCCESS);
  CHECK(words[3].load() == 1);
  CHECK(words[2].load() == 0);
  CHECK(CU(StreamQuery)(other) == CUDA_ERROR_NOT_READY);
  words[0].store(1);
  REQUIRE(CU(StreamSynchronize)(other) == CUDA_SUCCESS);
  CHECK(words[2].load() == 1);
  for (CUstream each : {waits, other, urgent}) CU(StreamDestroy)(each);
}

TEST_CASE("the double: a launch on a stream with 1,024 launches waits for room") {
  const CudaDriver driver;
  const CUstream full = stream();
  HostWords words;
  REQUIRE(CU(StreamWaitValue64)(full, words.address(0), 1, CU_STREAM_WAIT_VALUE_GEQ) ==
          CUDA_SUCCESS);
  std::atomic<int> queued = 0;
  auto filling = elsewhere(driver, [&] {
    for (std::uint64_t i = 0; i < 2000; ++i) {
      CU(StreamWriteValue64)(full, words.address(1), i, 0);
      ++queued;
    }
    return CUDA_SUCCESS;
  });
  until([&] { return queued >= 1023; });
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  CHECK(queued <= 1026);
  words[0].store(1);
  CHECK(filling.get() == CUDA_SUCCESS);
  REQUIRE(CU(StreamSynchronize)(full) == CUDA_SUCCESS);
  CHECK(words[1].load() == 1999);
  CU(StreamDestroy)(full);
}

TEST_CASE("the double: the next context gets the handle of one that was reset, if told to") {
  for (const bool same : {false, true}) {
    DOUBLE(same_handles)(same);
    const CudaDriver driver;
    const CUstream before = stream();
    REQUIRE(CU(DevicePrimaryCtxReset)(0) == CUDA_SUCCESS);
    CUcontext again = nullptr;
    REQUIRE(CU(DevicePrimaryCtxRetain)(&again, 0) == CUDA_SUCCESS);
    CHECK((again == driver.context()) == same);
    CHECK(CU(StreamQuery)(before) == CUDA_ERROR_INVALID_HANDLE);
    CU(DevicePrimaryCtxRelease)(0);
    CU(DevicePrimaryCtxReset)(0);
  }
  DOUBLE(same_handles)(false);
}

TEST_CASE("the double: a fault of another MPS client ends the context") {
  const CudaDriver driver;
  const CUdeviceptr memory = allocate(kBytes);
  DOUBLE(mps_fault)(0);
  unsigned char byte = 0;
  CHECK(CU(MemcpyDtoH)(&byte, memory, 1) == CUDA_ERROR_MPS_CLIENT_TERMINATED);
  CU(DevicePrimaryCtxReset)(0);
}

// The next case runs this in another process, with or without the end of a pipe. With one, the
// process has the memory open until the other end is closed.
TEST_CASE("the double: a child has memory open by its handle" * doctest::skip()) {
  const CudaDriver driver;
  CUdeviceptr memory = 0;
  REQUIRE(CU(IpcOpenMemHandle)(&memory, handle_from_parent(), CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) ==
          CUDA_SUCCESS);
  const char* const pipe = std::getenv(kPipe);
  if (pipe && ::fork() == 0) {
    char none = 0;
    (void)!::read(std::atoi(pipe), &none, 1);
    ::_exit(0);
  }
  if (pipe) ::_exit(0);
  REQUIRE(CU(IpcCloseMemHandle)(memory) == CUDA_SUCCESS);
}

TEST_CASE("the double: memory that another process has open must not be freed") {
  for (const bool open : {false, true}) {
    CAPTURE(open);
    const CudaDriver driver;
    const CUdeviceptr memory = allocate(kBytes);
    CUipcMemHandle handle{};
    REQUIRE(CU(IpcGetMemHandle)(&handle, memory) == CUDA_SUCCESS);
    std::array<int, 2> ends{};
    REQUIRE(::pipe(ends.data()) == 0);
    ::fcntl(ends[1], F_SETFD, FD_CLOEXEC);
    if (open) ::setenv(kPipe, std::to_string(ends[0]).c_str(), 1);
    CHECK(run_with_handle("the double: a child has memory open by its handle", handle) == 0);
    ::unsetenv(kPipe);
    CHECK(CU(MemFree)(memory) == CUDA_SUCCESS);
    CHECK((CU(CtxSynchronize)() == CUDA_SUCCESS) == !open);
    for (const int end : ends) ::close(end);
    if (open) CU(DevicePrimaryCtxReset)(0);
  }
}

TEST_SUITE_END();
