// The way to a rank on this host, or to this rank itself: each reads the other's memory, and
// nothing is sent. Messages that a rank of another host has sent to that rank for its neighbours
// are read there, too.
#pragma once

#include <memory>

#include "fd.hpp"
#include "moe/way.hpp"

namespace kvxfer::moe {

class LocalWay final : public Way {
 public:
  // Maps the memory that rank `of` gave, which is not trusted.
  static Result<std::unique_ptr<LocalWay>> map(const Shape& shape, std::uint32_t of,
                                               const UniqueFd& memory, std::size_t bytes,
                                               UniqueFd doorbell);
  // Makes the way to this rank. `own`: its memory, which outlives the way.
  static std::unique_ptr<LocalWay> to_self(const Shape& shape, const std::byte* own);

  // Wakes the other rank, if it sleeps.
  void ring() const;

  // --- messages that rank `from` of another host has sent there
  Held read_relayed(std::uint32_t from, std::uint32_t slot, std::uint64_t key, Routes& routes);
  const std::byte* relayed_tokens(std::uint32_t from, std::uint32_t slot) const;
  bool still_relayed(std::uint32_t from, std::uint32_t slot, std::uint64_t key) const;

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
  struct Unmap {
    void operator()(const std::byte* memory) const;
    std::size_t bytes = 0;  // 0: not to be unmapped
  };
  using Mapping = std::unique_ptr<const std::byte, Unmap>;
  LocalWay(const Shape& shape, Mapping memory, UniqueFd doorbell);

  std::uint64_t word(std::size_t offset, std::memory_order order) const;
  const std::byte* inbox(std::size_t number) const { return memory_.get() + layout_.inbox(number); }

  const Shape shape_;
  const OwnLayout layout_;     // equal at all ranks
  const InboxLayout inboxes_;  // likewise
  Mapping memory_;
  std::vector<std::size_t> combine_places_;        // by slot: the first row of the held combine
  std::vector<std::vector<std::size_t>> relayed_;  // by slot and rank: inbox of the held message
  UniqueFd doorbell_;
};

}  // namespace kvxfer::moe
