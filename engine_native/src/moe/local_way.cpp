#include "moe/local_way.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "aligned_mapping.hpp"
#include "error_text.hpp"
#include "fabric/local/ring.hpp"
#include "memory_order.hpp"

namespace kvxfer::moe {
Result<std::unique_ptr<LocalWay>> LocalWay::map(const Shape& shape, std::uint32_t of,
                                                const UniqueFd& memory, std::size_t bytes,
                                                UniqueFd doorbell) {
  const std::size_t expected = OwnLayout(shape).bytes();
  struct stat status{};
  if (bytes != expected || !local::sealed_against_shrinking(memory.get()) ||
      ::fstat(memory.get(), &status) != 0 ||
      static_cast<std::uint64_t>(status.st_size) < expected) {
    return Error{Errc::protocol_error,
                 "rank " + std::to_string(of) + " shares " + std::to_string(bytes) +
                     " bytes of memory, or memory that is no sealed memfd, instead of " +
                     std::to_string(expected) + "; start all ranks with the same shape"};
  }
  if (!set_nonblocking(doorbell.get())) {
    return Error{Errc::protocol_error, "rank " + std::to_string(of) + " has no doorbell"};
  }
  const std::byte* const data = map_aligned(memory.get(), expected, PROT_READ);
  if (!data) {
    return Error{Errc::out_of_memory, "cannot map " + std::to_string(expected) +
                                          " bytes of the memory of rank " + std::to_string(of) +
                                          ": " + errno_text()};
  }
  Mapping mapping(data, Unmap{expected});
  OwnHead head{};
  std::memcpy(static_cast<void*>(&head), data, offsetof(OwnHead, sleeping));
  if (head.magic != OwnHead::kMagic || head.digest != digest(shape) || head.rank != of) {
    return Error{Errc::protocol_error, "the memory of rank " + std::to_string(of) +
                                           " is of another rank, shape or version; start all "
                                           "ranks with the same shape and version"};
  }
  return std::unique_ptr<LocalWay>(new LocalWay(shape, std::move(mapping), std::move(doorbell)));
}

std::unique_ptr<LocalWay> LocalWay::to_self(const Shape& shape, const std::byte* own) {
  return std::unique_ptr<LocalWay>(new LocalWay(shape, Mapping(own, Unmap{}), UniqueFd()));
}

LocalWay::LocalWay(const Shape& shape, Mapping memory, UniqueFd doorbell)
    : shape_(shape),
      layout_(shape),
      inboxes_(shape),
      memory_(std::move(memory)),
      combine_places_(shape.slots),
      relayed_(shape.slots, std::vector<std::size_t>(shape.ranks)),
      doorbell_(std::move(doorbell)) {}

void LocalWay::Unmap::operator()(const std::byte* memory) const {
  if (bytes > 0) ::munmap(const_cast<std::byte*>(memory), bytes);
}

std::uint64_t LocalWay::word(std::size_t offset, std::memory_order order) const {
  return reinterpret_cast<const Word*>(memory_.get() + offset)->value.load(order);
}

void LocalWay::ring() const {
  if (!doorbell_ || word(offsetof(OwnHead, sleeping), std::memory_order_seq_cst) == 0) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(doorbell_.get(), &one, sizeof one);
}

Result<void> LocalWay::post_dispatch(std::uint32_t /*slot*/, const Cargo& /*cargo*/,
                                     std::vector<OperationId>& /*operations*/) {
  ring();
  return {};
}

Result<void> LocalWay::post_combine(std::uint32_t /*slot*/, std::uint32_t /*rows*/,
                                    std::vector<OperationId>& /*operations*/) {
  ring();
  return {};
}

Held LocalWay::dispatched(std::uint32_t slot, std::uint64_t key) {
  if (word(layout_.rows_word(slot), std::memory_order_seq_cst) == key) return Held::whole;
  return word(layout_.routes_word(slot), std::memory_order_seq_cst) == key ? Held::routes
                                                                           : Held::nothing;
}

Held LocalWay::read_routes(std::uint32_t slot, std::uint64_t key, Routes& routes) {
  const std::byte* const message = memory_.get() + layout_.message(slot, shape_.rank);
  MessageHead head{};
  std::memcpy(&head, message, sizeof head);
  const bool good =
      moe::read_routes(shape_, shape_.rank, head.rows, head.entries, message + sizeof head, routes);
  order_reads();
  if (word(layout_.routes_word(slot), std::memory_order_relaxed) == key) {
    return good ? Held::routes : Held::malformed;
  }
  routes.clear();
  return Held::nothing;
}

// --- relayed ---------------------------------------------------------------------------------

Held LocalWay::read_relayed(std::uint32_t from, std::uint32_t slot, std::uint64_t key,
                            Routes& routes) {
  if (word(layout_.relay_word(slot, from), std::memory_order_seq_cst) != key) return Held::nothing;
  MessageHead where{};
  std::memcpy(static_cast<void*>(&where), memory_.get() + layout_.relay_head(slot, from),
              sizeof where);
  if (!still_relayed(from, slot, key)) return Held::nothing;
  if (where.place >= layout_.inboxes()) return Held::malformed;
  const std::byte* const message =
      inbox(where.place) + inboxes_.message(slot, where.ordinal, shape_.rank);
  MessageHead head{};
  std::memcpy(static_cast<void*>(&head), message, sizeof head);
  if (head.key != key) return Held::nothing;  // the message for this rank comes directly
  const bool good =
      moe::read_routes(shape_, shape_.rank, head.rows, head.entries, message + sizeof head, routes);
  if (good && still_relayed(from, slot, key)) {
    relayed_[slot][from] = where.place;
    return Held::whole;
  }
  routes.clear();
  return still_relayed(from, slot, key) ? Held::malformed : Held::nothing;
}

const std::byte* LocalWay::relayed_tokens(std::uint32_t from, std::uint32_t slot) const {
  return inbox(relayed_[slot][from]) + inboxes_.tokens(slot);
}

bool LocalWay::still_relayed(std::uint32_t from, std::uint32_t slot, std::uint64_t key) const {
  order_reads();
  return word(layout_.relay_word(slot, from), std::memory_order_relaxed) == key;
}

// --- from that rank --------------------------------------------------------------------------

const std::byte* LocalWay::tokens(std::uint32_t slot) const {
  return memory_.get() + layout_.tokens(slot);
}

Held LocalWay::combined(std::uint32_t slot, std::uint64_t key, std::uint32_t rows) {
  const std::size_t offset = layout_.combine_word(slot, shape_.rank);
  if (word(offset, std::memory_order_seq_cst) != key) return Held::nothing;
  MessageHead head{};
  std::memcpy(static_cast<void*>(&head), memory_.get() + layout_.combine_head(slot, shape_.rank),
              sizeof head);
  if (!still(slot, Direction::combine, key)) return Held::nothing;
  const std::size_t most = shape_.combine_rows();
  if (head.rows != rows || rows > most || head.place > most - rows) return Held::malformed;
  combine_places_[slot] = head.place;
  return Held::whole;
}

const std::byte* LocalWay::combine_rows(std::uint32_t slot) const {
  return memory_.get() + layout_.combine(slot, combine_places_[slot]);
}

bool LocalWay::still(std::uint32_t slot, Direction direction, std::uint64_t key) const {
  order_reads();
  const std::size_t offset = direction == Direction::dispatch
                                 ? layout_.rows_word(slot)
                                 : layout_.combine_word(slot, shape_.rank);
  return word(offset, std::memory_order_relaxed) == key;
}

}  // namespace kvxfer::moe
