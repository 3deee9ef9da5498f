// Pinned host memory that bytes pass through on their way to or from a GPU: a bounded number of
// slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace kvxfer::cuda {

class Gpu;

// The number of a launch of a GPU, from 1; 0: none.
using Ticket = std::uint64_t;

// Enough for any one batch of a fabric.
inline constexpr std::size_t kSlotBytes = std::size_t{4} << 20;

// A slot in use. Once destroyed, it is free when every launch so far has ended. Engine thread.
class StagingSlot {
 public:
  StagingSlot(std::shared_ptr<Gpu> gpu, bool sends, std::byte* bytes)
      : gpu_(std::move(gpu)), sends_(sends), bytes_(bytes) {}
  ~StagingSlot() { give_back(); }
  StagingSlot(StagingSlot&& other) noexcept
      : gpu_(std::exchange(other.gpu_, nullptr)), sends_(other.sends_), bytes_(other.bytes_) {}
  StagingSlot& operator=(StagingSlot&& other) noexcept {
    give_back();
    gpu_ = std::exchange(other.gpu_, nullptr);
    sends_ = other.sends_;
    bytes_ = other.bytes_;
    return *this;
  }

  std::byte* bytes() const { return bytes_; }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(bytes_); }

 private:
  void give_back();

  std::shared_ptr<Gpu> gpu_;
  bool sends_;
  std::byte* bytes_;
};

// The slots of one direction. Directions have separate slots, so that senders that wait for
// receivers never prevent receiving.
class Staging {
 public:
  explicit Staging(std::span<std::byte> memory);

  // Returns null if all are in use. `ended`: the launches up to this one have ended.
  std::byte* take(Ticket ended);
  // Gives a slot back, which launches up to `until` may still read or write.
  void give_back(std::byte* slot, Ticket until);

 private:
  struct Free {
    std::byte* slot;
    Ticket after;
  };
  std::vector<Free> free_;
};

}  // namespace kvxfer::cuda
