// The way to a rank that the engine writes to, and that writes by its engine into an inbox here.
// Messages for other ranks of this host may come with it; those ranks read them here.
//
// A message is data (token or combine rows), counted by one counter, then a head, counted by
// another. From the head, the receiver knows how many data immediates there are. They arrive in any
// order. The sender posts the next message of a slot and direction when the last one has completed.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "kvxfer/engine.hpp"
#include "moe/own_memory.hpp"
#include "moe/way.hpp"

namespace kvxfer::moe {

class EngineWay final : public Way {
 public:
  // Takes an inbox and counters. `own` outlives the way.
  static Result<std::unique_ptr<EngineWay>> open(TransferEngine& engine, const Shape& shape,
                                                 std::uint32_t to, PeerId peer, OwnMemory& own,
                                                 Duration timeout);
  // Gives the inbox back.
  ~EngineWay() override;
  EngineWay(const EngineWay&) = delete;
  EngineWay& operator=(const EngineWay&) = delete;

  // Returns what the other rank needs to write here.
  std::string terms() const;
  // Takes what terms() returned at that rank; `own` is own memory, registered.
  Result<void> accept(std::string_view terms, RegionPtr own);
  bool accepted() const { return inbox_there_.has_value(); }
  // Notes an arrival with this immediate. Returns false if it is not one of this way's.
  bool arrived(Imm imm);
  // Notes that the slot's dispatch has another key from now on; its message may be here already.
  void look_again(std::uint32_t slot) { lane(slot, Direction::dispatch).fresh = true; }
  // The inbox, and the ordinal there, of the slot's dispatch once it is whole.
  std::size_t inbox_number() const { return *inbox_number_; }
  std::uint64_t ordinal(std::uint32_t slot) const {
    return lane(slot, Direction::dispatch).ordinal;
  }

  Result<void> post_dispatch(std::uint32_t slot, const Cargo& cargo,
                             std::vector<OperationId>& operations) override;
  Result<void> post_combine(std::uint32_t slot, std::uint32_t rows,
                            std::vector<OperationId>& operations) override;
  Held dispatched(std::uint32_t slot, std::uint64_t key) override;
  Held read_routes(std::uint32_t slot, std::uint64_t key, Routes& routes) override;
  const std::byte* tokens(std::uint32_t slot) const override;
  Held combined(std::uint32_t slot, std::uint64_t key, std::uint32_t rows) override;
  const std::byte* combine_rows(std::uint32_t slot) const override;
  bool still(std::uint32_t slot, Direction direction, std::uint64_t key) const override;

 private:
  struct Counters {
    Imm data = 0;
    Imm heads = 0;
  };
  // The state of one slot and direction.
  struct Lane {
    Counters here;
    Counters there;
    std::uint64_t messages = 0;  // sent
    std::uint64_t data = 0;      // immediates of all of them
    bool fresh = true;           // something may have arrived since the last look
    std::uint64_t expected = 0;  // data immediates that a completion will report
    std::uint64_t ordinal = 0;   // message that was whole at the last look
  };

  EngineWay(TransferEngine& engine, const Shape& shape, std::uint32_t to, PeerId peer,
            OwnMemory& own, Duration timeout);
  Lane& lane(std::uint32_t slot, Direction direction) {
    return lanes_[slot][static_cast<std::size_t>(direction)];
  }
  const Lane& lane(std::uint32_t slot, Direction direction) const {
    return lanes_[slot][static_cast<std::size_t>(direction)];
  }
  Result<void> sent(Lane& lane, const Result<Submitted>& submitted,
                    std::vector<OperationId>& operations);
  // Posts the message at this offset of own memory, of this length, as number next_ordinal().
  Result<void> post_message(Lane& lane, std::size_t offset, std::size_t to, std::size_t bytes,
                            std::vector<OperationId>& operations);
  static std::uint64_t next_ordinal(const Lane& lane) { return lane.messages + 1; }
  std::size_t dispatch_bytes(std::uint32_t slot, std::uint32_t to) const;
  // Reads the head of the message of this key, if all of the message is here.
  Held look(std::uint32_t slot, Direction direction, std::uint64_t key, MessageHead& head);
  const std::byte* inbox(std::size_t offset) const;

  TransferEngine& engine_;
  const Shape shape_;
  const std::uint32_t to_;
  const PeerId peer_;
  OwnMemory& own_;
  const Duration timeout_;
  const InboxLayout layout_;  // equal at all ranks
  std::optional<std::size_t> inbox_number_;
  RegionPtr inbox_;
  std::vector<std::array<Lane, kDirections>> lanes_;  // by slot
  RegionPtr own_region_;
  std::optional<MrDescriptor> inbox_there_;
};

}  // namespace kvxfer::moe
