// The rules that the double of a CUDA driver enforces (cuda_double.hpp has their sources). Cases
// hold on a GPU, too, unless they say that they are of the double alone.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <vector>

#include "doubles/cuda_driver.hpp"
#include "fd.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

CUmemAllocationProp properties(unsigned handles, bool rdma = false) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(handles);
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.allocFlags.gpuDirectRDMACapable = rdma ? 1 : 0;
  return wanted;
}

// Memory of cuMemCreate, mapped.
struct Mapped {
  explicit Mapped(const CUmemAllocationProp& wanted) {
    REQUIRE(CU(MemCreate)(&handle, kBlock, &wanted, 0) == CUDA_SUCCESS);
    map();
  }
  explicit Mapped(CUmemGenericAllocationHandle imported) : handle(imported) { map(); }
  ~Mapped() {
    if (mapped) CU(MemUnmap)(address, kBlock);
    CU(MemAddressFree)(address, kBlock);
    CU(MemRelease)(handle);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  void map() {
    REQUIRE(CU(MemAddressReserve)(&address, kBlock, 0, 0, 0) == CUDA_SUCCESS);
    REQUIRE(CU(MemMap)(address, kBlock, 0, handle, 0) == CUDA_SUCCESS);
  }
  void permit() const {
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    REQUIRE(CU(MemSetAccess)(address, kBlock, &access, 1) == CUDA_SUCCESS);
  }

  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;
  bool mapped = true;
};

int signal_of(const std::function<void()>& act) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);
    act();
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

}  // namespace

TEST_SUITE_BEGIN("cuda");

TEST_CASE("the processor cannot access device memory, before it is freed and after") {
  const CudaDriver driver;
  const CUdeviceptr address = allocate(kBytes);
  auto* const pointer = reinterpret_cast<volatile char*>(address);
  CHECK(signal_of([&] { pointer[0] = 1; }) == SIGSEGV);
  CHECK(signal_of([&] { static_cast<void>(pointer[kBytes - 1]); }) == SIGSEGV);
  CHECK(CU(MemFree)(address) == CUDA_SUCCESS);
  CHECK(signal_of([&] { static_cast<void>(pointer[0]); }) == SIGSEGV);
  CHECK(CU(MemFree)(address) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("calls that need a context are refused on a thread without one") {
  const CudaDriver driver;
  const CUdeviceptr address = allocate(kBytes);
  std::async(std::launch::async, [&] {
    CUdeviceptr other = 0;
    CHECK(CU(MemAlloc)(&other, kBytes) == CUDA_ERROR_INVALID_CONTEXT);
    CUstream made = nullptr;
    CHECK(CU(StreamCreate)(&made, CU_STREAM_NON_BLOCKING) == CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(CU(CtxPushCurrent)(driver.context()) == CUDA_SUCCESS);
    CHECK(CU(MemFree)(address) == CUDA_SUCCESS);
  }).get();
}

TEST_CASE("bytes go to the device and come back") {
  const CudaDriver driver;
  Random random;
  std::vector<std::byte> sent(3 * kBytes);
  std::vector<std::byte> got(sent.size());
  random.fill(sent.data(), sent.size());
  const CUdeviceptr first = allocate(sent.size());
  const CUdeviceptr second = allocate(sent.size());
  REQUIRE(CU(MemcpyHtoD)(first, sent.data(), sent.size()) == CUDA_SUCCESS);
  REQUIRE(CU(Memcpy)(second, first, sent.size()) == CUDA_SUCCESS);
  REQUIRE(CU(MemcpyDtoH)(got.data(), second, got.size()) == CUDA_SUCCESS);
  CHECK(got == sent);
  // The range exceeds the allocation; there is no allocation.
  CHECK(CU(MemcpyDtoH)(got.data(), second + 1, got.size()) == CUDA_ERROR_INVALID_VALUE);
  CU(MemFree)(first);
  CHECK(CU(MemcpyDtoH)(got.data(), first, 1) == CUDA_ERROR_INVALID_VALUE);
  CU(MemFree)(second);
}

TEST_CASE("a stream runs in order; two streams are ordered only by events") {
  const CudaDriver driver;
  const CUdeviceptr memory = allocate(2 * kBytes);
  const CUstream writes = stream();
  const CUstream reads = stream();
  CUevent written = nullptr;
  REQUIRE(CU(EventCreate)(&written, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
  for (const bool wait : {false, true}) {
    CAPTURE(wait);
    fill(memory, 1);
    fill(memory + kBytes, 1);
    {
      Gate gate(writes);
      std::vector<std::byte> two(kBytes, std::byte{2});
      REQUIRE(CU(MemcpyHtoDAsync)(memory, two.data(), kBytes, writes) == CUDA_SUCCESS);
      REQUIRE(CU(EventRecord)(written, writes) == CUDA_SUCCESS);
      CHECK(CU(EventQuery)(written) == CUDA_ERROR_NOT_READY);
      if (wait) REQUIRE(CU(StreamWaitEvent)(reads, written, 0) == CUDA_SUCCESS);
      REQUIRE(CU(MemcpyAsync)(memory + kBytes, memory, kBytes, reads) == CUDA_SUCCESS);
      if (!wait) REQUIRE(CU(StreamSynchronize)(reads) == CUDA_SUCCESS);
      CHECK(CU(StreamQuery)(writes) == CUDA_ERROR_NOT_READY);
      gate.open();
      REQUIRE(CU(StreamSynchronize)(reads) == CUDA_SUCCESS);
      REQUIRE(CU(StreamSynchronize)(writes) == CUDA_SUCCESS);
    }
    CHECK(CU(EventQuery)(written) == CUDA_SUCCESS);
    CHECK(first_byte(memory) == 2);
    CHECK(first_byte(memory + kBytes) == (wait ? 2 : 1));
  }
  CHECK(CU(EventDestroy)(written) == CUDA_SUCCESS);
  CHECK(CU(StreamDestroy)(writes) == CUDA_SUCCESS);
  CHECK(CU(StreamDestroy)(reads) == CUDA_SUCCESS);
  CU(MemFree)(memory);
}

TEST_CASE("the legacy stream is ordered with streams that block, and with no others") {
  const CudaDriver driver;
  HostWords words;
  for (const unsigned int flags : {CU_STREAM_DEFAULT, CU_STREAM_NON_BLOCKING}) {
    CAPTURE(flags);
    words[0].store(0);
    const CUstream other = stream(flags);
    Gate gate(nullptr);
    REQUIRE(CU(StreamWriteValue64)(other, words.address(0), 7, 0) == CUDA_SUCCESS);
    if (flags == CU_STREAM_NON_BLOCKING) {
      REQUIRE(CU(StreamSynchronize)(other) == CUDA_SUCCESS);
      CHECK(words[0].load() == 7);
    } else {
      CHECK(CU(StreamQuery)(other) == CUDA_ERROR_NOT_READY);
      CHECK(words[0].load() == 0);
    }
    gate.open();
    REQUIRE(CU(CtxSynchronize)() == CUDA_SUCCESS);
    CHECK(words[0].load() == 7);
    CU(StreamDestroy)(other);
  }
}

TEST_CASE("pinned memory is read when the copy runs, pageable memory when it is asked for") {
  const CudaDriver driver;
  const CUdeviceptr memory = allocate(kBytes);
  const CUstream copies = stream();
  std::vector<unsigned char> host(kBytes, 1);
  for (const bool pinned : {false, true}) {
    CAPTURE(pinned);
    if (pinned) REQUIRE(CU(MemHostRegister)(host.data(), kBytes, 0) == CUDA_SUCCESS);
    host[0] = 1;
    {
      Gate gate(copies);
      REQUIRE(CU(MemcpyHtoDAsync)(memory, host.data(), kBytes, copies) == CUDA_SUCCESS);
      host[0] = 2;
      gate.open();
      REQUIRE(CU(StreamSynchronize)(copies) == CUDA_SUCCESS);
    }
    CHECK(first_byte(memory) == (pinned ? 2 : 1));
  }
  CHECK(CU(MemHostRegister)(host.data(), kBytes, 0) == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  CHECK(CU(MemHostUnregister)(host.data()) == CUDA_SUCCESS);
  CHECK(CU(MemHostUnregister)(host.data()) == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  CU(StreamDestroy)(copies);
  CU(MemFree)(memory);
}

TEST_CASE("a batch of copies is one unit of work of its stream") {
  const CudaDriver driver;
  constexpr std::size_t kCount = 64;
  Random random;
  std::vector<std::byte> sent(kCount * kBytes);
  random.fill(sent.data(), sent.size());
  std::vector<std::byte> got(sent.size());
  REQUIRE(CU(MemHostRegister)(sent.data(), sent.size(), 0) == CUDA_SUCCESS);
  REQUIRE(CU(MemHostRegister)(got.data(), got.size(), 0) == CUDA_SUCCESS);
  const CUdeviceptr memory = allocate(sent.size());
  const CUstream copies = stream();
  const auto page = [](const void* host, std::size_t n) {
    return reinterpret_cast<CUdeviceptr>(host) + n * kBytes;
  };
  std::vector<CUdeviceptr> from, to, back;
  for (std::size_t n = 0; n < kCount; ++n) {
    from.push_back(page(sent.data(), n));
    to.push_back(memory + (n * 7 % kCount) * kBytes);
    back.push_back(page(got.data(), n));
  }
  std::vector<std::size_t> sizes(kCount, kBytes);
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  std::size_t first = 0;
  const auto batch = [&](std::vector<CUdeviceptr>& dsts, std::vector<CUdeviceptr>& srcs,
                         CUstream on) {
    return CU(MemcpyBatchAsync)(dsts.data(), srcs.data(), sizes.data(), kCount, &attributes, &first,
                                1, on);
  };
  REQUIRE(batch(to, from, copies) == CUDA_SUCCESS);
  REQUIRE(batch(back, to, copies) == CUDA_SUCCESS);
  REQUIRE(CU(StreamSynchronize)(copies) == CUDA_SUCCESS);
  CHECK(got == sent);
  CHECK(batch(back, to, nullptr) == CUDA_ERROR_INVALID_VALUE);
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_INVALID;
  CHECK(batch(back, to, copies) == CUDA_ERROR_INVALID_VALUE);
  for (std::vector<std::byte>* const host : {&sent, &got}) CU(MemHostUnregister)(host->data());
  CU(StreamDestroy)(copies);
  CU(MemFree)(memory);
}

TEST_CASE("a stream waits for words that the device reaches, in order with its work") {
  const CudaDriver driver;
  const CUstream waits = stream();
  HostWords words;
  REQUIRE(CU(StreamWaitValue64)(waits, words.address(0), 3, CU_STREAM_WAIT_VALUE_GEQ) ==
          CUDA_SUCCESS);
  REQUIRE(CU(StreamWaitValue64)(waits, words.address(1), 5, CU_STREAM_WAIT_VALUE_EQ) ==
          CUDA_SUCCESS);
  REQUIRE(CU(StreamWriteValue64)(waits, words.address(2), 9, 0) == CUDA_SUCCESS);
  words[0].store(2);
  CHECK(CU(StreamQuery)(waits) == CUDA_ERROR_NOT_READY);
  words[0].store(4);
  words[1].store(5);
  REQUIRE(CU(StreamSynchronize)(waits) == CUDA_SUCCESS);
  CHECK(words[2].load() == 9);
  std::uint64_t plain = 0;
  const auto heap = reinterpret_cast<CUdeviceptr>(&plain);
  CHECK(CU(StreamWriteValue64)(waits, heap, 1, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(CU(StreamWriteValue64)(waits, words.address(0) + 4, 1, 0) == CUDA_ERROR_INVALID_VALUE);
  CU(StreamDestroy)(waits);
}

TEST_CASE("an address is described by its attributes") {
  const CudaDriver driver;
  const CUdeviceptr device = allocate(3 * kBytes);
  HostWords words;
  int plain = 0;
  const auto type_of = [](CUdeviceptr address) {
    unsigned int type = 0;
    const auto found = CU(PointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
    return found == CUDA_SUCCESS ? static_cast<int>(type) : -1;
  };
  CHECK(type_of(device + kBytes) == CU_MEMORYTYPE_DEVICE);
  CHECK(type_of(words.address(0)) == CU_MEMORYTYPE_HOST);
  CHECK(type_of(reinterpret_cast<CUdeviceptr>(&plain)) == -1);
  CUdeviceptr base = 0;
  std::size_t size = 0;
  REQUIRE(CU(MemGetAddressRange)(&base, &size, device + 5) == CUDA_SUCCESS);
  CHECK(base == device);
  CHECK(size == 3 * kBytes);
  unsigned int type = 77;
  int ordinal = 77;
  unsigned long long id = 77;
  std::array<CUpointer_attribute, 3> wanted{CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                            CU_POINTER_ATTRIBUTE_BUFFER_ID};
  std::array<void*, 3> answers{&type, &ordinal, &id};
  REQUIRE(CU(PointerGetAttributes)(3, wanted.data(), answers.data(),
                                   reinterpret_cast<CUdeviceptr>(&plain)) == CUDA_SUCCESS);
  CHECK(type == 0);
  CHECK(ordinal == -2);
  CHECK(id == 0);
  REQUIRE(CU(PointerGetAttributes)(3, wanted.data(), answers.data(), device) == CUDA_SUCCESS);
  CHECK(type == CU_MEMORYTYPE_DEVICE);
  CHECK(ordinal == 0);
  CHECK(id != 0);
  CU(MemFree)(device);
}

TEST_CASE("the double: a freed address is used again, for another buffer") {
  const CudaDriver driver;
  const CUdeviceptr before = allocate(kBytes);
  fill(before, 5);
  unsigned long long first = 0;
  unsigned long long second = 0;
  REQUIRE(CU(PointerGetAttribute)(&first, CU_POINTER_ATTRIBUTE_BUFFER_ID, before) == CUDA_SUCCESS);
  CU(MemFree)(before);
  const CUdeviceptr after = allocate(kBytes);
  CHECK(after == before);
  REQUIRE(CU(PointerGetAttribute)(&second, CU_POINTER_ATTRIBUTE_BUFFER_ID, after) == CUDA_SUCCESS);
  CHECK(first != second);
  CHECK(first_byte(after) != 5);
  CU(MemFree)(after);
}

TEST_CASE(
    "memory of cuMemCreate is accessible once that is permitted, and exported if that was asked "
    "for") {
  const CudaDriver driver;
  Mapped mapped(properties(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  unsigned char byte = 0;
  CHECK(CU(MemcpyDtoH)(&byte, mapped.address, 1) == CUDA_ERROR_INVALID_VALUE);
  mapped.permit();
  fill(mapped.address, 3);
  CUipcMemHandle legacy{};
  CHECK(CU(IpcGetMemHandle)(&legacy, mapped.address) == CUDA_ERROR_INVALID_VALUE);
  int fd = -1;
  REQUIRE(CU(MemExportToShareableHandle)(
              &fd, mapped.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS);
  const UniqueFd exported(fd);
  CUmemGenericAllocationHandle again = 0;
  REQUIRE(CU(MemImportFromShareableHandle)(
              &again, reinterpret_cast<void*>(static_cast<std::intptr_t>(exported.get())),
              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == CUDA_SUCCESS);
  {
    const Mapped imported(again);
    imported.permit();
    CHECK(first_byte(imported.address) == 3);
  }
  const Mapped kept(properties(CU_MEM_HANDLE_TYPE_NONE));
  CHECK(CU(MemExportToShareableHandle)(&fd, kept.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                       0) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("a dmabuf has whole pages, of memory that may be exported") {
  const CudaDriver driver;
  const CUdeviceptr memory = allocate(kBlock);
  int fd = -1;
  const auto dmabuf = [&](CUdeviceptr address, std::size_t size) {
    const CUresult made =
        CU(MemGetHandleForAddressRange)(&fd, address, size, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
    if (made == CUDA_SUCCESS) ::close(fd);
    return made;
  };
  CHECK(dmabuf(memory, kBlock) == CUDA_SUCCESS);
  CHECK(dmabuf(memory + kBytes, kBytes) == CUDA_SUCCESS);
  CHECK(dmabuf(memory + 8, kBytes) == CUDA_ERROR_INVALID_VALUE);
  CHECK(dmabuf(memory, 8) == CUDA_ERROR_INVALID_VALUE);
  const Mapped able(properties(CU_MEM_HANDLE_TYPE_NONE, true));
  able.permit();
  CHECK(dmabuf(able.address, kBlock) == CUDA_SUCCESS);
  CU(MemFree)(memory);
}

TEST_CASE("the double: memory of cuMemCreate that did not ask for GPUDirect has no dmabuf") {
  const CudaDriver driver;
  const Mapped unable(properties(CU_MEM_HANDLE_TYPE_NONE));
  unable.permit();
  int fd = -1;
  CHECK(CU(MemGetHandleForAddressRange)(&fd, unable.address, kBlock,
                                        CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                                        0) == CUDA_ERROR_NOT_SUPPORTED);
}

TEST_CASE("the double: work on freed memory poisons the context, until it is created anew") {
  std::async(std::launch::async, [] {
    {
      const CudaDriver driver;
      const CUstream copies = stream();
      Mapped mapped(properties(CU_MEM_HANDLE_TYPE_NONE));
      mapped.permit();
      HostWords words;
      Gate gate(copies);
      REQUIRE(CU(MemcpyAsync)(words.address(0), mapped.address, 8, copies) == CUDA_SUCCESS);
      REQUIRE(CU(MemUnmap)(mapped.address, kBlock) == CUDA_SUCCESS);
      mapped.mapped = false;
      gate.open();
      CHECK(CU(StreamSynchronize)(copies) == CUDA_ERROR_ILLEGAL_ADDRESS);
      CUdeviceptr other = 0;
      CHECK(CU(MemAlloc)(&other, kBytes) == CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    const CudaDriver anew;
    CUdeviceptr other = 0;
    CHECK(CU(MemAlloc)(&other, kBytes) == CUDA_SUCCESS);
    CHECK(CU(MemFree)(other) == CUDA_SUCCESS);
  }).get();
}

TEST_CASE("the double: a kernel reaches device memory by its other address, in stream order") {
  const CudaDriver driver;
  struct Arguments {
    CUdeviceptr address;
    decltype(&cuda_double_alias) alias;
  } arguments{allocate(kBytes), DOUBLE(alias)};
  const CUstream runs = stream();
  const auto add_one = [](void* given) {
    const auto& [address, alias] = *static_cast<Arguments*>(given);
    auto* const bytes = static_cast<unsigned char*>(alias(address, 1));
    if (bytes) ++*bytes;
    return bytes != nullptr;
  };
  fill(arguments.address, 4);
  for (int i = 0; i < 3; ++i) {
    REQUIRE(DOUBLE(launch)(runs, add_one, &arguments) == CUDA_SUCCESS);
  }
  const std::uint64_t waits = DOUBLE(waits)();
  REQUIRE(CU(StreamSynchronize)(runs) == CUDA_SUCCESS);
  CHECK(DOUBLE(waits)() <= waits + 1);
  CHECK(first_byte(arguments.address) == 7);
  CU(StreamDestroy)(runs);
  CU(MemFree)(arguments.address);
}

// Runs in another process: see the next case.
TEST_CASE("importer of a legacy handle" * doctest::skip()) {
  const CudaDriver driver;
  const CUipcMemHandle handle = handle_from_parent();
  CUdeviceptr opened = 0;
  REQUIRE(CU(IpcOpenMemHandle)(&opened, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) ==
          CUDA_SUCCESS);
  CHECK(first_byte(opened + kBytes) == 6);
  fill(opened, 8);
  CUipcMemHandle again{};
  CHECK(CU(IpcGetMemHandle)(&again, opened) != CUDA_SUCCESS);
  CHECK(CU(MemFree)(opened) != CUDA_SUCCESS);
  CHECK(CU(IpcCloseMemHandle)(opened) == CUDA_SUCCESS);
  CHECK(CU(IpcCloseMemHandle)(opened) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("a legacy handle opens the whole allocation in another process, but not in its own") {
  const CudaDriver driver;
  const CUdeviceptr memory = allocate(2 * kBytes);
  fill(memory, 5);
  fill(memory + kBytes, 6);
  CUipcMemHandle handle{};
  REQUIRE(CU(IpcGetMemHandle)(&handle, memory + kBytes) == CUDA_SUCCESS);
  CUdeviceptr opened = 0;
  CHECK(CU(IpcOpenMemHandle)(&opened, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) ==
        CUDA_ERROR_INVALID_CONTEXT);

  CHECK(run_with_handle("importer of a legacy handle", handle) == 0);
  CHECK(first_byte(memory) == 8);
  CU(MemFree)(memory);
}

TEST_SUITE_END();
