// Two GPUs of one host: one that reads the other's memory, and one whose context is destroyed.
#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "gpu/gpu_memory.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

TEST_SUITE_BEGIN("cuda");

namespace {

// Writes pages from a region to memory of GPU 1 until nothing of them is staged, which is the case
// once that GPU has the source open, but at most `times` times. Returns whether that was reached.
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

// A region that begins in the middle of the first allocation.
RegionPtr region_in(TestEngine& engine, const Sleeper& memory) {
  constexpr std::size_t kInto = 4096;
  return good(engine->register_memory(reinterpret_cast<void*>(memory.address() + kInto),
                                      memory.size() - kInto));
}

}  // namespace

TEST_CASE(
    "the double: another GPU maps memory of cuMemCreate; other memory is staged in host memory") {
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
  // There is one notice for each reason why memory is staged.
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

TEST_CASE(
    "the double: a GPU that reads wrong bytes from another one gets them through host memory") {
  const CudaDriver driver;
  Random random;
  INFO("KVXFER_TEST_SEED=", random.seed);
  Sleeper first(1, true);
  Sleeper second(1, true);
  first.wake();
  second.wake();
  DOUBLE(peers_corrupt)(true);
  constexpr const char* kWrong =
      "reads wrong bytes there, although CUDA offers it; set the IOMMU of this host off";
  {
    Pair pair("local");
    const RegionPtr one = region_in(pair.writer, first);
    const RegionPtr other = region_in(pair.writer, second);
    CHECK_FALSE(reaches_second_gpu(pair, one, random, 3));
    says(pair.writer, {"memory of GPU 0 goes to GPU 1 of", "by way of host memory: GPU 1", kWrong});
    CHECK_FALSE(reaches_second_gpu(pair, other, random, 3));
    // A GPU reads its own memory without a probe.
    const Memory there(pair.reader, true, one->size());
    const std::uint64_t staged = pair.writer->stats().bytes_staged;
    const auto last = good(
        pair.writer->write(pair.to_reader, one, there.region()->descriptor(), {0, 0, one->size()}));
    bool again = false;
    pair.writer.await([&](const Completion& each) {
      again = again || each.text.find(kWrong) != std::string::npos;
      return each.kind == Completion::Kind::write && each.id == last.id;
    });
    CHECK_FALSE(again);
    CHECK(pair.writer->stats().bytes_staged == staged);
    good(pair.writer->deregister(one));
    good(pair.writer->deregister(other));
  }
  DOUBLE(peers_corrupt)(false);
  // The probe is repeated with each connection.
  Pair pair("local");
  const RegionPtr one = region_in(pair.writer, first);
  CHECK(reaches_second_gpu(pair, one, random, kOften));
  good(pair.writer->deregister(one));
  first.sleep();
  second.sleep();
}

TEST_CASE("the double: a GPU whose context is destroyed is lost, and sends no other memory") {
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
    // The peer could still read the memory that it has mapped.
    Sleeper mapped(1, true);
    mapped.wake();
    const RegionPtr shared = region_in(pair.writer, mapped);
    const RegionPtr on_second = good(pair.reader->allocate_on_gpu(1, kBlock));
    CHECK(reaches_second_gpu(pair, shared, random, kOften) == (fabric == "local"));
    REQUIRE(CU(DevicePrimaryCtxReset)(0) == CUDA_SUCCESS);
    // The first write involves no copy by the writer's own GPU.
    for (const auto& [from, to] :
         {std::pair(shared, on_second), std::pair(source, there),
          std::pair(source, to_host.region()), std::pair(from_host.region(), there)}) {
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

TEST_SUITE_END();
