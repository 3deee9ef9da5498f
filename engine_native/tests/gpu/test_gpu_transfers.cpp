// Transfers from and to memory of a GPU, on the double of a driver or on a GPU.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gpu/gpu_memory.hpp"
#include "transfer_slots.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

TEST_SUITE_BEGIN("cuda");

namespace {

struct Way {
  std::string fabric;
  bool from_gpu;
  bool to_gpu;
};
std::vector<Way> ways() {
  std::vector<Way> all;
  for (const std::string& fabric : gpu_fabrics()) {
    all.insert(all.end(), {{fabric, true, true}, {fabric, true, false}, {fabric, false, true}});
  }
  return all;
}

// Makes a GPU see what NICs have written to its memory.
void flush() {
  const auto flush_writes = CU(FlushGPUDirectRDMAWrites);
  flush_writes(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
               CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
}

}  // namespace

TEST_CASE("scattered pages move from and to memory of a GPU") {
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

// There are so many batches that every slot of staging memory, and of a ring, is reused.
TEST_CASE("more pages than there is room for move from and to a GPU") {
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

TEST_CASE("paths that have nothing to send leave staging memory to others") {
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

TEST_CASE("a batch for the host that follows one for a GPU is counted after it") {
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
      // The owner overwrites the pages, so a late copy would show.
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

TEST_CASE("memory that is mapped again, or freed and allocated again, is new each time") {
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

TEST_SUITE_END();
