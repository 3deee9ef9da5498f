// Decides whether and where an arriving batch is placed, by the same rules on every fabric whose
// receiver places the bytes. A batch for a GPU ends later than it arrives: after its copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cuda/gpu.hpp"
#include "domain.hpp"

namespace kvxfer {

// One batch: all its writes go to one region with one immediate. Once it is revoked or refused, its
// remaining bytes must be dropped, and nothing is counted.
class Placement {
 public:
  Placement(ReceiveContext& receive_context, PeerId writer, std::uint64_t key,
            std::optional<Imm> imm);

  // Returns the address at which this write is placed; 0 once the batch is refused.
  std::uint64_t target(std::uint64_t offset, std::uint32_t length);
  // The GPU that has the memory; null for host memory.
  const std::shared_ptr<cuda::Gpu>& gpu() const { return gpu_; }
  // Ends the batch: counts its immediates unless it was refused.
  void finish(std::uint64_t writes, std::uint64_t immediates, std::uint64_t bytes);

  // Refuses the batch, for a reason of the fabric.
  void refuse(Errc status);
  void revoke_counter(Imm imm);
  void revoke_region(std::uint64_t key);
  Errc status() const { return status_; }

 private:
  ReceiveContext* receive_context_;
  PeerId writer_;
  std::uint64_t key_;
  std::optional<Imm> imm_;
  RegionPtr region_;
  std::shared_ptr<cuda::Gpu> gpu_;  // the region's
  Errc status_ = Errc::ok;
};

}  // namespace kvxfer
