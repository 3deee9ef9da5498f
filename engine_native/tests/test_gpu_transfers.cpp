// Transfers from and to memory of a GPU, on the double of a driver or on a GPU.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_driver.hpp"
#include "transfer_slots.hpp"
#ifdef KVXFER_HAVE_VERBS
#include "fabric/verbs/verbs_factory.hpp"
#include "simulated_verbs.hpp"
#endif

using namespace kvxfer;
using namespace kvxfer::test;

TEST_SUITE_BEGIN("cuda");

namespace {

// Memory of an engine, of the host or of GPU 0, whose bytes a test may read and write.
class Memory {
 public:
  Memory(TestEngine& engine, bool on_gpu, std::size_t size)
      : engine_(engine),
        region_(good(on_gpu ? engine->allocate_on_gpu(0, size) : engine->allocate(size))) {}
  ~Memory() { good(engine_->deregister(region_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  const RegionPtr& region() const { return region_; }
  Bytes read() const { return read(0, region_->size()); }
  Bytes read(std::size_t offset, std::size_t size) const {
    Bytes bytes(size);
    if (region_->host()) {
      std::copy_n(region_->host() + offset, size, bytes.begin());
    } else {
      REQUIRE(CU(MemcpyDtoH)(bytes.data(), region_->address() + offset, size) == CUDA_SUCCESS);
    }
    return bytes;
  }
  void write(const Bytes& bytes) const { write(0, bytes); }
  void write(std::size_t offset, const Bytes& bytes) const {
    if (region_->host()) {
      std::copy(bytes.begin(), bytes.end(), region_->host() + offset);
    } else {
      REQUIRE(CU(MemcpyHtoD)(region_->address() + offset, bytes.data(), bytes.size()) ==
              CUDA_SUCCESS);
    }
  }

 private:
  TestEngine& engine_;
  RegionPtr region_;
};

// An address of GPU 0 behind which memory of cuMemCreate comes and goes, as where an inference
// engine sleeps and wakes. `files`: other processes may map it.
class Sleeper {
 public:
  explicit Sleeper(std::size_t blocks = 1, bool files = false) : files_(files), handles_(blocks) {
    REQUIRE(CU(MemAddressReserve)(&address_, size(), 0, 0, 0) == CUDA_SUCCESS);
  }
  ~Sleeper() { CU(MemAddressFree)(address_, size()); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  void wake() {
    CUmemAllocationProp wanted{};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.allocFlags.gpuDirectRDMACapable = 1;
    if (files_) wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUdeviceptr at = address_;
    for (CUmemGenericAllocationHandle& handle : handles_) {
      REQUIRE(CU(MemCreate)(&handle, kBlock, &wanted, 0) == CUDA_SUCCESS);
      REQUIRE(CU(MemMap)(std::exchange(at, at + kBlock), kBlock, 0, handle, 0) == CUDA_SUCCESS);
    }
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    REQUIRE(CU(MemSetAccess)(address_, size(), &access, 1) == CUDA_SUCCESS);
  }
  void sleep() const {
    REQUIRE(CU(MemUnmap)(address_, size()) == CUDA_SUCCESS);
    for (const auto handle : handles_) REQUIRE(CU(MemRelease)(handle) == CUDA_SUCCESS);
  }
  CUdeviceptr address() const { return address_; }
  std::size_t size() const { return handles_.size() * kBlock; }

 private:
  bool files_;
  CUdeviceptr address_ = 0;
  std::vector<CUmemGenericAllocationHandle> handles_;
};

struct Way {
  const char* fabric;
  bool from_gpu;
  bool to_gpu;
};
// NICs with GPUDirect there are on the double alone: a GPU's memory is no use to simulated ones.
std::vector<Way> ways() {
  std::vector<Way> all{{"tcp", true, true},   {"tcp", true, false},   {"tcp", false, true},
                       {"local", true, true}, {"local", true, false}, {"local", false, true}};
#ifdef KVXFER_HAVE_VERBS
  if (!std::getenv("KVXFER_TEST_CUDA")) {
    all.insert(all.end(), {{"mlx5", true, true}, {"mlx5", true, false}, {"mlx5", false, true}});
  }
#endif
  return all;
}

// What a NIC has written and a GPU has not seen comes to its memory now.
void flush() {
  const auto flush_writes = CU(FlushGPUDirectRDMAWrites);
  flush_writes(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
               CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
}

Bytes random_bytes_of(Random& random, std::size_t size) {
  Bytes bytes(size);
  random.fill(bytes.data(), size);
  return bytes;
}

}  // namespace

TEST_CASE("scattered pages go from and to memory of a GPU") {
  const CudaDriver driver;
  Random random;
  INFO("KVXFER_TEST_SEED=", random.seed);
  for (const Way& way : ways()) {
    INFO(way.fabric, way.from_gpu ? " GPU" : " host", way.to_gpu ? " to GPU" : " to host");
    Pair pair(way.fabric);
    for (const std::size_t page : {std::size_t{64}, std::size_t{1000}, std::size_t{4096},
                                   std::size_t{65536}, std::size_t{100'000}}) {
      constexpr std::size_t kPool = 96;
      const Memory source(pair.writer, way.from_gpu, kPool * page);
      const Memory destination(pair.reader, way.to_gpu, kPool * page);
      const Bytes sent = random_bytes_of(random, kPool * page);
      source.write(sent);
      const auto from = random.distinct_pages(64, kPool);
      const auto to = random.distinct_pages(64, kPool);
      const Imm imm = good(pair.reader->allocate_counter());
      const auto submitted = good(pair.writer->write_pages(pair.to_reader, source.region(),
                                                           destination.region()->descriptor(),
                                                           {.page_length = page,
                                                            .source_pages = from,
                                                            .destination_pages = to,
                                                            .source_stride = page,
                                                            .destination_stride = page},
                                                           {.imm = imm, .timeout = kDeadline}));
      good(pair.reader->expect(imm, submitted.immediates));
      CHECK(pair.reader.await(Completion::Kind::counter, imm).code == Errc::ok);
      const Bytes got = destination.read();
      Bytes expected(kPool * page);
      for (std::size_t i = 0; i < from.size(); ++i) {
        std::copy_n(sent.begin() + from[i] * static_cast<std::ptrdiff_t>(page), page,
                    expected.begin() + to[i] * static_cast<std::ptrdiff_t>(page));
      }
      CHECK(got == expected);
      const auto done = pair.writer.await(Completion::Kind::write, submitted.id);
      CHECK_MESSAGE(done.code == Errc::ok, done.text);
      pair.reader->release_counter(imm);
    }
  }
}

// So many batches that every slot of staging memory, and of a ring, is used again and again.
TEST_CASE("more pages than there is room for go from and to a GPU") {
  const CudaDriver driver;
  constexpr std::size_t kSmall = 64;
  constexpr std::size_t kMany = 20'000;
  Random random;
  INFO("KVXFER_TEST_SEED=", random.seed);
  for (const Way& way : ways()) {
    INFO(way.fabric, way.from_gpu ? " GPU" : " host", way.to_gpu ? " to GPU" : " to host");
    Pair pair(way.fabric);
    const Memory source(pair.writer, way.from_gpu, kSmall * kMany);
    const Memory destination(pair.reader, way.to_gpu, kSmall * kMany);
    const Bytes sent = random_bytes_of(random, kSmall * kMany);
    source.write(sent);
    const auto pages = random.distinct_pages(kMany, kMany);
    const Imm imm = good(pair.reader->allocate_counter());
    const auto submitted = good(pair.writer->write_pages(
        pair.to_reader, source.region(), destination.region()->descriptor(),
        same_pages(kSmall, pages), {.imm = imm, .timeout = kDeadline}));
    good(pair.reader->expect(imm, submitted.immediates));
    CHECK(pair.reader.await(Completion::Kind::counter, imm).code == Errc::ok);
    CHECK(destination.read() == sent);
  }
}

TEST_CASE("paths that have nothing to send keep no staging memory from others") {
  const CudaDriver driver;
  constexpr std::size_t kSize = std::size_t{8} << 20;  // over both lanes, and more than one batch
  TestEngine writer(options_for("tcp", "writer"));
  const Memory source(writer, true, kSize);
  source.write(Bytes(kSize, std::byte{5}));
  std::vector<std::unique_ptr<TestEngine>> readers;
  for (int i = 0; i < 6; ++i) {
    readers.push_back(std::make_unique<TestEngine>(options_for("tcp", "reader")));
    const PeerId to = writer.connect_to(*readers.back());
    const Memory destination(*readers.back(), false, kSize);
    write_and_count(writer, to, *readers.back(), source.region(), destination.region(),
                    {0, 0, kSize});
    CHECK(destination.read() == Bytes(kSize, std::byte{5}));
  }
}

TEST_CASE("a batch for the host that comes behind one for a GPU is counted after it") {
  const CudaDriver driver;
  for (const std::string fabric : {"tcp", "local"}) {
    Pair pair(fabric, 1);
    const Memory source(pair.writer, false, kBytes);
    const Memory on_gpu(pair.reader, true, kBytes);
    const Memory on_host(pair.reader, false, kBytes);
    source.write(Bytes(kBytes, std::byte{7}));
    const Imm imm = good(pair.reader->allocate_counter());
    for (int round = 0; round < 50; ++round) {
      for (const Memory* to : {&on_gpu, &on_host}) {
        good(pair.writer->write(pair.to_reader, source.region(), to->region()->descriptor(),
                                {0, 0, kBytes}, {.imm = imm, .timeout = kDeadline}));
      }
    }
    good(pair.reader->expect(imm, 100));
    CHECK(pair.reader.await(Completion::Kind::counter, imm).code == Errc::ok);
    CHECK(on_gpu.read() == Bytes(kBytes, std::byte{7}));
    CHECK(on_host.read() == Bytes(kBytes, std::byte{7}));
  }
}

TEST_CASE("after a counter is released, or its region closed, nothing lands on the GPU") {
  const CudaDriver driver;
  Random random;
  INFO("KVXFER_TEST_SEED=", random.seed);
  constexpr std::size_t kPage = 16384;
  constexpr std::size_t kCount = 128;
  for (const Way& way : ways()) {
    if (!way.to_gpu) continue;
    INFO(way.fabric, way.from_gpu ? " GPU" : " host");
    Pair pair(way.fabric);
    const Memory source(pair.writer, way.from_gpu, kCount * kPage);
    source.write(Bytes(kCount * kPage, std::byte{1}));
    for (int round = 0; round < 20; ++round) {
      auto destination = std::make_unique<Memory>(pair.reader, true, kCount * kPage);
      const RegionPtr region = destination->region();
      const Imm imm = good(pair.reader->allocate_counter());
      const auto pages = random.distinct_pages(kCount, kCount);
      const auto submitted =
          good(pair.writer->write_pages(pair.to_reader, source.region(), region->descriptor(),
                                        same_pages(kPage, pages), {.imm = imm}));
      while (pair.reader->counter_value(imm) < random.below(kCount / 4)) {
        std::this_thread::yield();
      }
      if (round % 2 == 0) {
        pair.reader->release_counter(imm);
      } else {
        destination.reset();
      }
      // Overwritten by its owner: a late copy would show.
      fill(region->address(), 0, region->size());
      flush();
      pair.writer.await(Completion::Kind::write, submitted.id);
      Bytes now(region->size());
      REQUIRE(CU(MemcpyDtoH)(now.data(), region->address(), now.size()) == CUDA_SUCCESS);
      CHECK(now == Bytes(region->size()));
      pair.reader->release_counter(imm);
    }
  }
}

TEST_CASE("memory that sleeps and wakes, or is freed and allocated again, is new each time") {
  const CudaDriver driver;
  Random random;
  INFO("KVXFER_TEST_SEED=", random.seed);
  for (const Way& way : ways()) {
    if (!way.to_gpu) continue;
    INFO(way.fabric, way.from_gpu ? " GPU" : " host");
    Pair pair(way.fabric);
    const Memory source(pair.writer, way.from_gpu, kBlock);
    Sleeper sleeper;
    CUdeviceptr last = 0;
    for (int round = 0; round < 10; ++round) {
      CAPTURE(round);
      const bool sleeps = round % 2 == 0;
      if (sleeps) sleeper.wake();
      const CUdeviceptr address = sleeps ? sleeper.address() : allocate(kBlock);
      const RegionPtr region =
          good(pair.reader->register_memory(reinterpret_cast<void*>(address), kBlock));
      const Bytes sent = random_bytes_of(random, kBlock);
      source.write(sent);
      write_and_count(pair.writer, pair.to_reader, pair.reader, source.region(), region,
                      {0, 0, kBlock});
      Bytes got(kBlock);
      REQUIRE(CU(MemcpyDtoH)(got.data(), address, kBlock) == CUDA_SUCCESS);
      CHECK(got == sent);
      good(pair.reader->deregister(region));
      if (sleeps) {
        sleeper.sleep();
      } else {
        CU(MemFree)(address);
        if (last != 0 && !std::getenv("KVXFER_TEST_CUDA")) CHECK(address == last);
        last = address;
      }
    }
  }
}

TEST_CASE("after a peer is fenced off, nothing of it lands on the GPU") {
  const CudaDriver driver;
  Random random;
  constexpr std::size_t kPage = 16384;
  constexpr std::size_t kCount = 128;
  for (const Way& way : ways()) {
    if (!way.to_gpu) continue;
    INFO(way.fabric, way.from_gpu ? " GPU" : " host");
    for (int round = 0; round < 10; ++round) {
      Pair pair(way.fabric);
      const Memory source(pair.writer, way.from_gpu, kCount * kPage);
      const Memory destination(pair.reader, true, kCount * kPage);
      source.write(Bytes(kCount * kPage, std::byte{1}));
      const Imm imm = good(pair.reader->allocate_counter());
      const auto pages = random.distinct_pages(kCount, kCount);
      const auto submitted = good(pair.writer->write_pages(pair.to_reader, source.region(),
                                                           destination.region()->descriptor(),
                                                           same_pages(kPage, pages), {.imm = imm}));
      while (pair.reader->counter_value(imm) == 0) std::this_thread::yield();
      good(pair.reader->fence(pair.to_writer));
      destination.write(Bytes(kCount * kPage));
      flush();
      pair.writer.await(Completion::Kind::write, submitted.id);
      CHECK(destination.read() == Bytes(kCount * kPage));
    }
  }
}

TEST_CASE(
    "with faults in transfers of a GPU, each has its bytes, and what was released gets none") {
  constexpr int kRounds = 2000;
  const CudaDriver driver;
  Random random;
  INFO("KVXFER_TEST_SEED=", random.seed);
  using Slots = TransferSlots<Memory>;
  const auto all = ways();
  for (const Way& way : all) {
    INFO(way.fabric, way.from_gpu ? " GPU" : " host", way.to_gpu ? " to GPU" : " to host");
    Pair pair(way.fabric);
    const Memory source(pair.writer, way.from_gpu, Slots::kSize);
    const Memory destination(pair.reader, way.to_gpu, Slots::kSize);
    Slots slots(random, pair, source, destination);
    for (std::size_t round = 0; round < kRounds / all.size() + 1; ++round) {
      CAPTURE(round);
      slots.round();
    }
  }
}

namespace {

// Pages from a region to memory of GPU 1, again and again until nothing of it is staged, which
// counts once that GPU has the source open; at most so many times. Whether that came about.
bool reaches_second_gpu(Pair& pair, const RegionPtr& source, Random& random, int times) {
  const RegionPtr there = good(pair.reader->allocate_on_gpu(1, source->size()));
  bool direct = false;
  for (int round = 0; round < times && !direct; ++round) {
    const Bytes sent = random_bytes_of(random, source->size());
    const std::uint64_t staged = pair.writer->stats().bytes_staged;
    REQUIRE(CU(MemcpyHtoD)(source->address(), sent.data(), sent.size()) == CUDA_SUCCESS);
    write_and_count(pair.writer, pair.to_reader, pair.reader, source, there,
                    {0, 0, source->size()});
    Bytes got(source->size());
    REQUIRE(CU(MemcpyDtoH)(got.data(), there->address(), got.size()) == CUDA_SUCCESS);
    CHECK(got == sent);
    direct = pair.writer->stats().bytes_staged == staged;
  }
  good(pair.reader->deregister(there));
  return direct;
}
constexpr int kOften = 100;

void says(TestEngine& engine, const std::vector<const char*>& parts) {
  engine.await([&](const Completion& each) {
    return each.kind == Completion::Kind::notice &&
           std::ranges::all_of(
               parts, [&](const char* part) { return each.text.find(part) != std::string::npos; });
  });
}

// From the middle of its first allocation on.
RegionPtr region_in(TestEngine& engine, const Sleeper& memory) {
  constexpr std::size_t kInto = 4096;
  return good(engine->register_memory(reinterpret_cast<void*>(memory.address() + kInto),
                                      memory.size() - kInto));
}

}  // namespace

TEST_CASE("the double: another GPU maps memory of cuMemCreate, else it goes by host memory") {
  const CudaDriver driver;
  Random random;
  INFO("KVXFER_TEST_SEED=", random.seed);
  Sleeper files(3, true);
  {
    Pair pair("local");
    for (int round = 0; round < 3; ++round) {
      files.wake();
      const RegionPtr region = region_in(pair.writer, files);
      CHECK(reaches_second_gpu(pair, region, random, kOften));
      good(pair.writer->deregister(region));
      files.sleep();
    }
  }
  // Said once for each way that is not taken.
  Pair pair("local");
  Sleeper none(2);
  none.wake();
  const RegionPtr without = region_in(pair.writer, none);
  CHECK_FALSE(reaches_second_gpu(pair, without, random, 2));
  good(pair.writer->deregister(without));
  none.sleep();
  says(pair.writer, {"by way of host memory: CUDA has no file of it (CUDA_ERROR_INVALID_VALUE)"});

  DOUBLE(peers)(false);
  Pair apart("local");
  files.wake();
  const RegionPtr region = region_in(apart.writer, files);
  CHECK_FALSE(reaches_second_gpu(apart, region, random, 2));
  good(apart.writer->deregister(region));
  files.sleep();
  DOUBLE(peers)(true);
  says(apart.writer, {"memory of GPU 0 goes to GPU 1 of", "by way of host memory: GPU 1",
                      "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"});

  for (const std::string fabric : {"tcp", "local"}) {
    Pair allocated(fabric);
    const Memory source(allocated.writer, true, kBlock);
    CHECK_FALSE(reaches_second_gpu(allocated, source.region(), random, 2));
  }
}

TEST_CASE("the double: a GPU whose context is destroyed is lost, and gives no other's memory") {
  Random random;
  for (const std::string fabric : {"tcp", "local"}) {
    CAPTURE(fabric);
    const CudaDriver driver;
    CUcontext second = nullptr;
    REQUIRE(CU(DevicePrimaryCtxRetain)(&second, 1) == CUDA_SUCCESS);
    Pair pair(fabric);
    const RegionPtr source = good(pair.writer->allocate_on_gpu(0, kBlock));
    const RegionPtr there = good(pair.reader->allocate_on_gpu(0, kBlock));
    const Memory from_host(pair.writer, false, kBlock);
    const Memory to_host(pair.reader, false, kBlock);
    write_and_count(pair.writer, pair.to_reader, pair.reader, source, there, {0, 0, kBlock});
    // The peer would go on reading what it has mapped.
    Sleeper mapped(1, true);
    mapped.wake();
    const RegionPtr shared = region_in(pair.writer, mapped);
    const RegionPtr on_second = good(pair.reader->allocate_on_gpu(1, kBlock));
    CHECK(reaches_second_gpu(pair, shared, random, kOften) == (fabric == "local"));
    REQUIRE(CU(DevicePrimaryCtxReset)(0) == CUDA_SUCCESS);
    for (const auto& [from, to] :
         {std::pair(source, there), std::pair(source, to_host.region()),
          std::pair(shared, on_second), std::pair(from_host.region(), there)}) {
      const auto lost =
          good(pair.writer->write(pair.to_reader, from, to->descriptor(), {0, 0, kBytes}));
      CHECK(pair.writer.await(Completion::Kind::write, lost.id).code == Errc::gpu_lost);
    }
    REQUIRE(CU(CtxPushCurrent)(second) == CUDA_SUCCESS);
    const auto refused = pair.writer->allocate_on_gpu(0, kBlock);
    REQUIRE(CU(CtxPopCurrent)(nullptr) == CUDA_SUCCESS);
    REQUIRE(!refused);
    CHECK(refused.error().code == Errc::gpu_lost);
    from_host.write(Bytes(kBlock, std::byte{3}));
    write_and_count(pair.writer, pair.to_reader, pair.reader, from_host.region(), to_host.region(),
                    {0, 0, kBlock});
    CHECK(to_host.read() == Bytes(kBlock, std::byte{3}));
    good(pair.writer->deregister(shared));
    mapped.sleep();
    good(pair.writer->deregister(source));
    good(pair.reader->deregister(there));
    good(pair.reader->deregister(on_second));
    REQUIRE(CU(DevicePrimaryCtxRelease)(1) == CUDA_SUCCESS);
  }
}

#ifdef KVXFER_HAVE_VERBS

namespace {

// An engine with NICs like these, and with tcp.
EngineOptions options_with_nics(const std::vector<SimulatedDevice>& like) {
  static std::atomic<unsigned> hosts = 0;
  EngineOptions options = options_for("tcp", "host");
  const std::string prefix = "gpudirect" + std::to_string(++hosts) + "_";
  for (std::size_t n = 0; n < like.size(); ++n) {
    SimulatedDevice device = like[n];
    device.name = prefix + std::to_string(n);
    options.nics.push_back(device.name);
    simulated_verbs().add(device);
  }
  options.more_nics = std::make_shared<verbs::VerbsFactory>(simulated_verbs().library());
  return options;
}

std::vector<std::string> ways_of(const RegionPtr& region, std::uint32_t nics) {
  std::vector<std::string> ways;
  for (std::uint32_t n = 0; n < nics; ++n) {
    const NicRegistration* const registration = region->registration(n);
    ways.emplace_back(registration ? registration->way() : "none");
  }
  return ways;
}

}  // namespace

TEST_CASE("the double: a NIC takes dmabuf, else nvidia-peermem, else says once why it cannot") {
  const CudaDriver driver;
  TestEngine engine(options_with_nics({{.peermem = true},
                                       {.dmabuf = false, .peermem = true},
                                       {.dmabuf = false},
                                       {.peermem = true, .fails_writes_to_dmabufs = true}}));
  const Memory first(engine, true, kBlock);
  const Memory second(engine, true, kBlock);
  const std::vector<std::string> expected{"dmabuf", "peermem", "none", "peermem"};
  CHECK(ways_of(first.region(), 4) == expected);
  CHECK(ways_of(second.region(), 4) == expected);
  const std::string notice = engine.await(Completion::Kind::notice).text;
  for (const char* part : {"_2 does not reach memory of GPU 0", "by dmabuf, NIC",
                           "by nvidia-peermem, NIC", "Bad address", "it goes another way"}) {
    CHECK_MESSAGE(notice.find(part) != std::string::npos, notice);
  }
  CHECK(std::ranges::none_of(
      engine->drain(), [](const Completion& one) { return one.kind == Completion::Kind::notice; }));
}

// As without peer-to-peer support in the kernel: everything is registered, and nothing arrives.
TEST_CASE(
    "the double: a NIC whose writes do not arrive on the GPU is found out before it is used") {
  const CudaDriver driver;
  EngineOptions options = options_with_nics({{.loses_writes_to_gpus = true}});
  {
    TestEngine engine(options);
    const Memory memory(engine, true, kBlock);
    CHECK(ways_of(memory.region(), 1) == std::vector<std::string>{"none"});
    const std::string notice = engine.await(Completion::Kind::notice).text;
    CHECK_MESSAGE(notice.find("by dmabuf, what the NIC wrote did not arrive") != std::string::npos,
                  notice);
  }
  options.tcp = false;
  TestEngine without_tcp(options);
  const auto refused = without_tcp->allocate_on_gpu(0, kBlock);
  REQUIRE(!refused);
  CHECK(refused.error().code == Errc::fabric_unavailable);
}

TEST_CASE("the double: a NIC whose link is down is tried again with the next region") {
  const CudaDriver driver;
  EngineOptions options = options_with_nics({{}, {}});
  options.tcp = false;
  TestEngine engine(options);
  for (const std::string& nic : options.nics) simulated_verbs().set_link(nic, false);
  CHECK(engine->allocate_on_gpu(0, kBlock).error().code == Errc::nic_lost);
  simulated_verbs().set_link(options.nics[1], true);
  const Memory before(engine, true, kBlock);
  CHECK(ways_of(before.region(), 2) == std::vector<std::string>{"none", "dmabuf"});
  simulated_verbs().set_link(options.nics[0], true);
  const Memory after(engine, true, kBlock);
  CHECK(ways_of(after.region(), 2) == std::vector<std::string>{"dmabuf", "dmabuf"});
}

// A dmabuf takes no windows: a grant in it is the region's key, and ends when the writer is asked.
TEST_CASE("the double: grants of GPU memory, by dmabuf and peermem, on either end of a page") {
  const CudaDriver driver;
  Random random;
  INFO("KVXFER_TEST_SEED=", random.seed);
  for (const SimulatedDevice& like :
       {SimulatedDevice{}, SimulatedDevice{.dmabuf = false, .peermem = true}}) {
    const auto options = [&like] {
      EngineOptions made = options_with_nics({{}, like});
      made.tcp = false;
      return made;
    };
    TestEngine writer(options());
    TestEngine reader(options());
    const PeerId to = writer.connect_to(reader);
    const PeerId from = reader.await(Completion::Kind::peer_up).peer;
    const Memory all(reader, true, kBlock);
    const Memory source(writer, true, kBytes);
    // Not of whole pages.
    constexpr std::size_t kOffset = 1000;
    const RegionPtr part = good(reader->register_memory(
        reinterpret_cast<void*>(all.region()->address() + kOffset), kBlock - 2 * kOffset));
    CHECK(ways_of(part, 2) == ways_of(all.region(), 2));
    for (int round = 0; round < 20; ++round) {
      const Bytes sent = random_bytes_of(random, kBytes);
      source.write(sent);
      const Imm imm = good(reader->allocate_counter(from));
      const std::size_t at = random.below(part->size() - kBytes);
      const RegionRange range{part, at, kBytes};
      const auto grant = good(reader->grant(imm, {&range, 1})).front();
      const auto submitted = good(writer->write(to, source.region(), grant, {0, 0, kBytes},
                                                {.imm = imm, .timeout = kDeadline}));
      good(reader->expect(imm, submitted.immediates));
      REQUIRE(reader.await(Completion::Kind::counter, imm).code == Errc::ok);
      CHECK(all.read(kOffset + at, kBytes) == sent);
      reader->release_counter(imm);
      good(reader->send(from, "released"));
      writer.await(Completion::Kind::message);
      const auto late =
          good(writer->write(to, source.region(), grant, {0, 0, kBytes}, {.imm = imm}));
      CHECK(writer.await(Completion::Kind::write, late.id).code != Errc::ok);
    }
    good(reader->deregister(part));
  }
}

#endif

TEST_SUITE_END();
