// Transfers between the NICs of the simulated network, with faults. The seed chooses the faults
// (KVXFER_TEST_SEED repeats it); the threads of the engines and of the network decide when.
#include <string>

#include "doubles/simulated_nic.hpp"
#include "transfer_slots.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

constexpr int kRounds = 2000;

struct HostMemory {
  HostMemory(TestEngine& engine, std::size_t size) : region_(good(engine->allocate(size))) {}

  const RegionPtr& region() const { return region_; }
  Bytes read(std::size_t offset, std::size_t size) const {
    const std::byte* const at = region_->host() + offset;
    return {at, at + size};
  }
  void write(std::size_t offset, const Bytes& bytes) const {
    std::copy(bytes.begin(), bytes.end(), region_->host() + offset);
  }

 private:
  RegionPtr region_;
};
using Slots = TransferSlots<HostMemory>;

}  // namespace

TEST_CASE("with any faults, each transfer has its bytes, and released memory gets none") {
  Random random;
  CAPTURE(random.seed);
  for (const std::string fabric : {"simulated", "ordered"}) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const std::string nic = pair.writer->nics()[0].name;  // the other NIC never fails
    const HostMemory source(pair.writer, Slots::kSize);
    const HostMemory destination(pair.reader, Slots::kSize);
    Slots slots(random, pair, source, destination);
    // Sometimes its link goes down, half of the time after completions were lost.
    const auto fail_nic = [&] {
      if (random.below(30) != 0) return;
      simulated_network().lose_completions(nic, random.below(2) == 0);
      slots.wait_a_moment();
      simulated_network().set_link(nic, false);
      simulated_network().lose_completions(nic, false);
    };
    for (int round = 0; round < kRounds; ++round) {
      CAPTURE(round);
      slots.round(fail_nic, [&] { simulated_network().set_link(nic, true); });
    }
  }
}
