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

// Numbers the launches of a GPU, from 1; 0: none.
using Ticket = std::uint64_t;

// Takes the bytes of any one batch of a fabric.
inline constexpr std::size_t kSlotBytes = std::size_t{4} << 20;

// A slot in use. When it is destroyed it is free once every launch so far has ended. Engine thread.
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

// The slots of one direction: senders that wait for receivers never keep these from receiving.
class Staging {
 public:
  explicit Staging(std::span<std::byte> memory);

  // Null where all are in use. `ended`: the launches up to this one have ended.
  std::byte* take(Ticket ended);
  // It may still be read or written by launches up to this one.
  void give_back(std::byte* slot, Ticket until);

 private:
  struct Free {
    std::byte* slot;
    Ticket after;
  };
  std::vector<Free> free_;
};

}  // namespace kvxfer::cuda
