// Many small transfers at once between two memories, each with a different fault: every transfer
// has its bytes, and released memory gets none.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "support.hpp"

namespace kvxfer::test {

// Memory has region(), read(offset, size) and write(offset, bytes).
template <class Memory>
class TransferSlots {
 public:
  static constexpr std::size_t kSlots = 4;
  static constexpr std::size_t kSlotPages = 16;
  static constexpr std::size_t kPage = 512;
  static constexpr std::size_t kSlot = kSlotPages * kPage;
  static constexpr std::size_t kSize = kSlots * kSlot;  // the bytes of each memory

  TransferSlots(Random& random, Pair& pair, const Memory& source, const Memory& destination)
      : random_(random), pair_(pair), source_(source), destination_(destination) {}

  // `disturb` is called once the transfers are under way, `settle` once they have ended.
  void round(
      const std::function<void()>& disturb = [] {}, const std::function<void()>& settle = [] {}) {
    std::vector<Transfer> transfers;
    for (const auto slot : random_.distinct_pages(1 + random_.below(kSlots), kSlots)) {
      transfers.push_back(begin(static_cast<std::size_t>(slot)));
    }
    disturb();
    std::shuffle(transfers.begin(), transfers.end(), random_.engine);
    for (Transfer& transfer : transfers) end(transfer);
    settle();
    for (const Transfer& transfer : transfers) check(transfer);
  }
  // Waits for a random moment of the transfers. It sleeps, as a yield takes milliseconds on a busy
  // machine.
  void wait_a_moment() {
    if (random_.below(2) == 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds(random_.below(50)));
  }

 private:
  using Kind = Completion::Kind;
  enum class Fault : std::uint8_t { none, released, cancelled };
  struct Transfer {
    std::size_t slot;
    Fault fault;
    std::vector<std::int64_t> pages;
    Bytes sent;
    Imm imm = 0;
    Submitted submitted{};
  };

  static Bytes all(std::byte value) { return Bytes(kSlot, value); }

  Transfer begin(std::size_t slot) {
    Transfer transfer{.slot = slot,
                      .fault = static_cast<Fault>(random_.below(3)),
                      .pages = random_.distinct_pages(1 + random_.below(kSlotPages), kSlotPages),
                      .sent = Bytes(kSlot)};
    random_.fill(transfer.sent.data(), kSlot);
    source_.write(slot * kSlot, transfer.sent);
    destination_.write(slot * kSlot, all(std::byte{0}));
    transfer.imm = good(pair_.reader->allocate_counter(pair_.to_writer));
    const RegionRange range{destination_.region(), slot * kSlot, kSlot};
    const auto grant = good(pair_.reader->grant(transfer.imm, {&range, 1})).front();
    transfer.submitted =
        good(pair_.writer->write_pages(pair_.to_reader, source_.region(), grant,
                                       {.page_length = kPage,
                                        .source_pages = transfer.pages,
                                        .destination_pages = transfer.pages,
                                        .source_stride = kPage,
                                        .destination_stride = kPage,
                                        .source_offset = slot * kSlot},
                                       {.imm = transfer.imm, .timeout = kDeadline}));
    return transfer;
  }

  void end(Transfer& transfer) {
    wait_a_moment();
    if (transfer.fault == Fault::none) {
      good(pair_.reader->expect(transfer.imm, transfer.submitted.immediates));
      CHECK(pair_.reader.await(Kind::counter, transfer.imm).code == Errc::ok);
      pair_.reader->release_counter(transfer.imm);
      return;
    }
    if (transfer.fault == Fault::cancelled) {
      pair_.writer->cancel(transfer.submitted.id);
      pair_.writer.await(Kind::write, transfer.submitted.id);
      source_.write(transfer.slot * kSlot, all(std::byte{0xee}));  // nothing reads it any more
    }
    pair_.reader->release_counter(transfer.imm);
    // From now on the slot has another owner.
    destination_.write(transfer.slot * kSlot, all(std::byte{0xdd}));
  }

  void check(const Transfer& transfer) {
    if (transfer.fault != Fault::cancelled) {
      const auto done = pair_.writer.await(Kind::write, transfer.submitted.id);
      if (transfer.fault == Fault::none) CHECK_MESSAGE(done.code == Errc::ok, done.text);
    }
    Bytes expected = all(transfer.fault == Fault::none ? std::byte{0} : std::byte{0xdd});
    if (transfer.fault == Fault::none) {
      for (const std::int64_t page : transfer.pages) {
        const std::ptrdiff_t at = page * static_cast<std::ptrdiff_t>(kPage);
        std::copy_n(transfer.sent.begin() + at, kPage, expected.begin() + at);
      }
    }
    REQUIRE(destination_.read(transfer.slot * kSlot, kSlot) == expected);
  }

  Random& random_;
  Pair& pair_;
  const Memory& source_;
  const Memory& destination_;
};

}  // namespace kvxfer::test
