// Two queue pairs of one NIC that write to each other.
#pragma once

#include <array>
#include <memory>

#include "fabric/nic/gpu_ways.hpp"
#include "fabric/verbs/queue_pair.hpp"
#include "fabric/verbs/receive_queue.hpp"

namespace kvxfer::verbs {

class VerbsLoop final : public NicLoop {
 public:
  // Fails with nic-lost if the link is down.
  static Result<std::unique_ptr<NicLoop>> open(const std::shared_ptr<const VerbsDevice>& device);
  ~VerbsLoop() override;
  VerbsLoop(const VerbsLoop&) = delete;
  VerbsLoop& operator=(const VerbsLoop&) = delete;

  Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion& region,
                                                           MemoryWay way) override;
  Result<void> write(const NicRegistration& source, std::uint64_t from, const RemoteKey& to,
                     std::uint32_t bytes) override;

 private:
  explicit VerbsLoop(std::shared_ptr<const VerbsDevice> device) : device_(std::move(device)) {}
  Result<void> start();

  std::shared_ptr<const VerbsDevice> device_;
  ibv_cq* completions_ = nullptr;
  std::unique_ptr<ReceiveQueue> receives_;
  std::array<std::shared_ptr<QueuePair>, 2> pairs_;
};

}  // namespace kvxfer::verbs
