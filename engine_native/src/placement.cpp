#include "placement.hpp"

namespace kvxfer {

Placement::Placement(ReceiveContext& receive_context, PeerId writer, std::uint64_t key,
                     std::optional<Imm> imm)
    : receive_context_(&receive_context), writer_(writer), key_(key), imm_(imm) {
  if (imm_ && !receive_context.counters.counts(*imm_, writer)) {
    status_ = Errc::stale_counter;
    return;
  }
  region_ = receive_context.regions.find(key);
  const auto* const grant = region_ && region_->granted() ? &*region_->granted() : nullptr;
  if (grant && (grant->imm != imm_ || grant->writer != writer)) region_.reset();
  if (region_) gpu_ = region_->gpu();
}

std::uint64_t Placement::target(std::uint64_t offset, std::uint32_t length) {
  if (status_ != Errc::ok) return 0;
  if (!region_) {
    if (length > 0 || !imm_) status_ = Errc::unknown_region;  // an immediate alone needs none
    return 0;
  }
  if (offset > region_->size() || length > region_->size() - offset) {
    status_ = Errc::out_of_bounds;
    return 0;
  }
  return region_->address() + offset;
}

void Placement::finish(std::uint64_t writes, std::uint64_t immediates, std::uint64_t bytes) {
  if (status_ != Errc::ok) {
    receive_context_->stats.writes_refused.count(status_, writes);
    return;
  }
  receive_context_->stats.writes_received += writes;
  receive_context_->stats.bytes_received += bytes;
  if (imm_ && immediates > 0) receive_context_->counters.add(*imm_, writer_, immediates);
}

void Placement::refuse(Errc status) {
  if (status_ == Errc::ok) status_ = status;
}

void Placement::revoke_counter(Imm imm) {
  if (status_ == Errc::ok && imm_ == imm) {
    status_ = Errc::stale_counter;
    region_.reset();
  }
}

void Placement::revoke_region(std::uint64_t key) {
  if (status_ == Errc::ok && region_ && key_ == key) {
    status_ = Errc::unknown_region;
    region_.reset();
  }
}

}  // namespace kvxfer
