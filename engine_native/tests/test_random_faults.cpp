// Many small transfers at once between the NICs of the simulated network, each with a fault of its
// own. The seed chooses what befalls whom (KVXFER_TEST_SEED repeats it); the threads of the engines
// and of the network choose when.
#include <algorithm>
#include <cstring>
#include <thread>

#include "simulated_nic.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

constexpr int kRounds = 2000;
constexpr std::size_t kSlots = 4;
constexpr std::size_t kSlotPages = 16;
constexpr std::size_t kSmall = 512;
constexpr std::size_t kSlot = kSlotPages * kSmall;

enum class Fault : std::uint8_t { none, released, cancelled };

struct Transfer {
  std::size_t slot;
  Fault fault;
  std::vector<std::int64_t> pages;
  Imm imm = 0;
  Submitted submitted{};
};

class Slots {
 public:
  Slots(Random& random, const std::string& fabric) : random_(random), pair_(fabric) {}

  void round() {
    std::vector<Transfer> transfers;
    for (const auto slot : random_.distinct_pages(1 + random_.below(kSlots), kSlots)) {
      transfers.push_back(begin(static_cast<std::size_t>(slot)));
    }
    if (random_.below(30) == 0) fail_nic();
    std::shuffle(transfers.begin(), transfers.end(), random_.engine);
    for (Transfer& transfer : transfers) end(transfer);
    simulated_network().set_link(nic_, true);
    for (const Transfer& transfer : transfers) check(transfer);
  }

 private:
  std::byte* source(const Transfer& transfer) const {
    return source_->host() + transfer.slot * kSlot;
  }
  std::byte* destination(const Transfer& transfer) const {
    return destination_->host() + transfer.slot * kSlot;
  }

  // Its link goes down, half of the time after completions were lost.
  void fail_nic() {
    const bool loses = random_.below(2) == 0;
    simulated_network().lose_completions(nic_, loses);
    yield();
    simulated_network().set_link(nic_, false);
    simulated_network().lose_completions(nic_, false);
  }
  void yield() {
    for (auto turns = random_.below(20); turns > 0; --turns) std::this_thread::yield();
  }

  Transfer begin(std::size_t slot) {
    Transfer transfer{.slot = slot,
                      .fault = static_cast<Fault>(random_.below(3)),
                      .pages = random_.distinct_pages(1 + random_.below(kSlotPages), kSlotPages)};
    random_.fill(source(transfer), kSlot);
    std::memset(destination(transfer), 0, kSlot);
    transfer.imm = good(pair_.reader->allocate_counter(pair_.to_writer));
    const RegionRange range{destination_, slot * kSlot, kSlot};
    const auto grant = good(pair_.reader->grant(transfer.imm, {&range, 1})).front();
    transfer.submitted =
        good(pair_.writer->write_pages(pair_.to_reader, source_, grant,
                                       {.page_length = kSmall,
                                        .source_pages = transfer.pages,
                                        .destination_pages = transfer.pages,
                                        .source_stride = kSmall,
                                        .destination_stride = kSmall,
                                        .source_offset = slot * kSlot},
                                       {.imm = transfer.imm, .timeout = kDeadline}));
    return transfer;
  }

  void end(Transfer& transfer) {
    yield();
    if (transfer.fault == Fault::none) {
      good(pair_.reader->expect(transfer.imm, transfer.submitted.immediates));
      CHECK(pair_.reader.await(Kind::counter, transfer.imm).code == Errc::ok);
      pair_.reader->release_counter(transfer.imm);
      return;
    }
    if (transfer.fault == Fault::cancelled) {
      pair_.writer->cancel(transfer.submitted.id);
      pair_.writer.await(Kind::write, transfer.submitted.id);
      std::memset(source(transfer), 0xee, kSlot);  // nobody reads it any more
    }
    pair_.reader->release_counter(transfer.imm);
    std::memset(destination(transfer), 0xdd, kSlot);  // somebody else's from now on
  }

  void check(const Transfer& transfer) {
    if (transfer.fault != Fault::cancelled) {
      const auto done = pair_.writer.await(Kind::write, transfer.submitted.id);
      if (transfer.fault == Fault::none) CHECK_MESSAGE(done.code == Errc::ok, done.text);
    }
    const std::byte* const bytes = destination(transfer);
    if (transfer.fault != Fault::none) {
      REQUIRE(std::all_of(bytes, bytes + kSlot, [](std::byte b) { return b == std::byte{0xdd}; }));
      return;
    }
    for (std::size_t page = 0; page < kSlotPages; ++page) {
      const bool sent = std::find(transfer.pages.begin(), transfer.pages.end(),
                                  static_cast<std::int64_t>(page)) != transfer.pages.end();
      const std::byte* const at = bytes + page * kSmall;
      if (sent) {
        REQUIRE(std::memcmp(at, source(transfer) + page * kSmall, kSmall) == 0);
      } else {
        REQUIRE(std::all_of(at, at + kSmall, [](std::byte b) { return b == std::byte{0}; }));
      }
    }
  }

  Random& random_;
  Pair pair_;
  std::string nic_ = pair_.writer->nics()[0].name;  // the other one stays
  RegionPtr source_ = good(pair_.writer->allocate(kSlots * kSlot));
  RegionPtr destination_ = good(pair_.reader->allocate(kSlots * kSlot));
};

}  // namespace

TEST_CASE("whatever befalls transfers, each has its bytes, and what was released gets none") {
  Random random;
  CAPTURE(random.seed);
  for (const std::string fabric : {"simulated", "ordered"}) {
    CAPTURE(fabric);
    Slots slots(random, fabric);
    for (int round = 0; round < kRounds; ++round) {
      CAPTURE(round);
      slots.round();
    }
  }
}
