// Whether, and where, an arriving batch may be placed; the same rules on every fabric whose
// receiver places the bytes. A batch for a GPU ends later than it arrives: when its copies have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cuda/gpu.hpp"
#include "domain.hpp"

namespace kvxfer {

// One batch: all its writes go to one region under one immediate. It is placed while it is
// granted; once it is not, its remaining bytes must be dropped and nothing is counted.
class Placement {
 public:
  Placement(ReceiveContext& receive_context, PeerId writer, std::uint64_t key,
            std::optional<Imm> imm);

  // Where this write goes; 0 once the batch is refused.
  std::uint64_t target(std::uint64_t offset, std::uint32_t length);
  // Whose memory that is; null where it is the host's, or the batch is refused.
  const std::shared_ptr<cuda::Gpu>& gpu() const { return gpu_; }
  // Ends the batch: counts its immediates if it is still granted.
  void finish(std::uint64_t writes, std::uint64_t immediates, std::uint64_t bytes);

  // The batch cannot be placed for a reason of the fabric's own.
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
  std::shared_ptr<cuda::Gpu> gpu_;  // of the region
  Errc status_ = Errc::ok;
};

}  // namespace kvxfer
