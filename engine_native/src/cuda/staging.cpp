#include "cuda/staging.hpp"

#include <algorithm>
#include <cassert>

#include "cuda/gpu.hpp"

namespace kvxfer::cuda {

Staging::Staging(std::span<std::byte> memory) {
  for (std::size_t at = 0; at + kSlotBytes <= memory.size(); at += kSlotBytes) {
    free_.push_back({&memory[at], 0});
  }
}

std::byte* Staging::take(Ticket ended) {
  const auto found = std::find_if(free_.begin(), free_.end(),
                                  [ended](const Free& slot) { return slot.after <= ended; });
  if (found == free_.end()) return nullptr;
  std::byte* const slot = found->slot;
  free_.erase(found);
  return slot;
}

void Staging::give_back(std::byte* slot, Ticket until) {
  assert(std::ranges::find(free_, slot, &Free::slot) == free_.end());
  free_.push_back({slot, until});
}

void StagingSlot::give_back() {
  if (gpu_) gpu_->give_back(bytes_, sends_);
  gpu_.reset();
}

}  // namespace kvxfer::cuda
