// NICs that access GPU memory themselves (GPUDirect): the method that they use, and the notice if
// none works. Simulated NICs, on the double of a driver.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "doubles/simulated_gpus.hpp"
#include "gpu/gpu_memory.hpp"
#ifdef KVXFER_HAVE_VERBS
#include "doubles/simulated_verbs.hpp"
#include "fabric/verbs/verbs_factory.hpp"
#endif
#ifdef KVXFER_HAVE_OFI
#include "doubles/simulated_efa.hpp"
#include "fabric/ofi/ofi_factory.hpp"
#endif

using namespace kvxfer;
using namespace kvxfer::test;

TEST_SUITE_BEGIN("cuda");

namespace {

struct Nic {
  bool dmabuf = true;
  bool peermem = false;
  bool loses_writes_to_gpus = false;
  bool fails_writes_to_dmabufs = false;
};

// The kinds of NICs that this build has.
std::vector<std::string> kinds() {
  std::vector<std::string> all{"mlx5", "efa"};
  std::erase_if(all, [](const std::string& kind) {
    return std::ranges::find(all_fabrics(), kind) == all_fabrics().end();
  });
  return all;
}

// Options of an engine with NICs like these, and with tcp.
EngineOptions options_with_nics(const std::string& kind, const std::vector<Nic>& like) {
  static std::atomic<unsigned> hosts = 0;
  EngineOptions options = options_for("tcp", "host");
  const std::string prefix = "gpudirect" + std::to_string(++hosts) + "_";
  for (std::size_t n = 0; n < like.size(); ++n) {
    const std::string name = prefix + std::to_string(n);
    options.nics.push_back(name);
    const auto add = [&](auto& network, auto device) {
      device.name = name;
      device.dmabuf = like[n].dmabuf;
      device.peermem = like[n].peermem;
      device.loses_writes_to_gpus = like[n].loses_writes_to_gpus;
      device.fails_writes_to_dmabufs = like[n].fails_writes_to_dmabufs;
      network.add(device);
    };
#ifdef KVXFER_HAVE_VERBS
    if (kind == "mlx5") add(simulated_verbs(), SimulatedDevice{});
#endif
#ifdef KVXFER_HAVE_OFI
    if (kind == "efa") add(simulated_efa(), SimulatedEfaDevice{});
#endif
  }
#ifdef KVXFER_HAVE_VERBS
  if (kind == "mlx5") {
    options.more_nics = std::make_shared<verbs::VerbsFactory>(simulated_verbs().library());
  }
#endif
#ifdef KVXFER_HAVE_OFI
  if (kind == "efa") {
    options.more_nics = std::make_shared<ofi::OfiFactory>(ofi::OfiFactory::Overrides{
        .use = FabricUse::required, .library = simulated_efa().library()});
  }
#endif
  return options;
}

std::vector<std::string> ways_of(const RegionPtr& region, std::uint32_t nics) {
  std::vector<std::string> ways;
  for (std::uint32_t n = 0; n < nics; ++n) {
    const NicRegistration* const registration = region->registration(n);
    ways.emplace_back(registration ? name_of(registration->way()) : "none");
  }
  return ways;
}

}  // namespace

TEST_CASE("the double: a flush leaves what arrives while it runs") {
  const CudaDriver driver;
  TestEngine engine(options_with_nics(kinds().front(), {{}}));
  const Memory memory(engine, true, kBlock);
  const auto there = std::make_shared<std::byte>();
  const auto write = [&there] {
    gpu_writes().land(
        {.at = there.get(), .bytes = {std::byte{1}}, .on_gpu = true, .mapping = there});
  };
  during_flush = write;
  // Repeats if this thread was so slow that the bytes landed by themselves.
  for (int tries = 0; tries < 100 && there.use_count() != 2; ++tries) {
    write();
    write();
    REQUIRE(CU(FlushGPUDirectRDMAWrites)(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                                         CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER) == CUDA_SUCCESS);
  }
  during_flush = nullptr;
  CHECK(there.use_count() == 2);  // the last write is not flushed yet
  gpu_writes().flush();
  CHECK(there.use_count() == 1);
}

TEST_CASE("the double: a NIC uses dmabuf, else nvidia-peermem, else reports once why it cannot") {
  const CudaDriver driver;
  for (const std::string& kind : kinds()) {
    CAPTURE(kind);
    TestEngine engine(
        options_with_nics(kind, {{.peermem = true},
                                 {.dmabuf = false, .peermem = true},
                                 {.dmabuf = false},
                                 {.peermem = true, .fails_writes_to_dmabufs = true}}));
    const Memory first(engine, true, kBlock);
    const Memory second(engine, true, kBlock);
    // libfabric may choose a dmabuf itself, too.
    const std::vector<std::string> expected{"dmabuf", "peermem", "none",
                                            kind == "efa" ? "none" : "peermem"};
    CHECK(ways_of(first.region(), 4) == expected);
    CHECK(ways_of(second.region(), 4) == expected);
    const std::string notice = engine.await(Completion::Kind::notice).text;
    for (const std::string& part :
         {std::string("_2"), std::string("does not reach memory of GPU 0"),
          std::string("by dmabuf, NIC"),
          std::string(kind == "efa" ? "by FI_HMEM_CUDA, NIC" : "by nvidia-peermem, NIC"),
          std::string("Bad address"), std::string("its bytes take another path")}) {
      CHECK_MESSAGE(notice.find(part) != std::string::npos, notice);
    }
    CHECK(std::ranges::none_of(engine->drain(), [](const Completion& one) {
      return one.kind == Completion::Kind::notice;
    }));
  }
}

// As in a kernel without peer-to-peer support, all memory can be registered, and nothing arrives.
TEST_CASE("the double: a NIC whose writes do not arrive on the GPU is detected before it is used") {
  const CudaDriver driver;
  for (const std::string& kind : kinds()) {
    CAPTURE(kind);
    EngineOptions options = options_with_nics(kind, {{.loses_writes_to_gpus = true}});
    {
      TestEngine engine(options);
      const Memory memory(engine, true, kBlock);
      CHECK(ways_of(memory.region(), 1) == std::vector<std::string>{"none"});
      const std::string notice = engine.await(Completion::Kind::notice).text;
      CHECK_MESSAGE(
          notice.find("by dmabuf, what the NIC wrote did not arrive") != std::string::npos, notice);
    }
    options.tcp = false;
    TestEngine without_tcp(options);
    const auto refused = without_tcp->allocate_on_gpu(0, kBlock);
    REQUIRE(!refused);
    CHECK(refused.error().code == Errc::fabric_unavailable);
  }
}

#ifdef KVXFER_HAVE_OFI
TEST_CASE("the double: with a libfabric without CUDA, tcp moves memory of GPUs, with a notice") {
  const CudaDriver driver;
  simulated_efa().have_cuda(false);
  TestEngine engine(options_with_nics("efa", {{}}));
  const Memory memory(engine, true, kBlock);
  simulated_efa().have_cuda(true);
  CHECK(ways_of(memory.region(), 1) == std::vector<std::string>{"none"});
  const std::string notice = engine.await(Completion::Kind::notice).text;
  CHECK_MESSAGE(notice.find("libfabric 2.5 does not offer FI_HMEM") != std::string::npos, notice);
}
#endif

#ifdef KVXFER_HAVE_VERBS
TEST_CASE("the double: a NIC whose link is down is tried again with the next region") {
  const CudaDriver driver;
  EngineOptions options = options_with_nics("mlx5", {{}, {}});
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
#endif

// A dmabuf takes no windows: a grant in it uses the region's key, and the writer has to end it.
TEST_CASE("the double: grants of GPU memory, by dmabuf and peermem, on either end of a page") {
  const CudaDriver driver;
  Random random;
  INFO("KVXFER_TEST_SEED=", random.seed);
  for (const std::string& kind : kinds()) {
    for (const Nic& like : {Nic{}, Nic{.dmabuf = false, .peermem = true}}) {
      CAPTURE(kind);
      const auto options = [&] {
        EngineOptions made = options_with_nics(kind, {{}, like});
        made.tcp = false;
        return made;
      };
      TestEngine writer(options());
      TestEngine reader(options());
      const PeerId to = writer.connect_to(reader);
      const PeerId from = reader.await(Completion::Kind::peer_up).peer;
      const Memory all(reader, true, kBlock);
      const Memory source(writer, true, kBytes);
      // The range does not consist of whole pages.
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
}

TEST_SUITE_END();
