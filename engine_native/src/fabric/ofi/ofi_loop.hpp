// Two endpoints of one NIC; the first one writes to the second one.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "fabric/nic/gpu_ways.hpp"
#include "fabric/ofi/endpoint.hpp"

namespace kvxfer::ofi {

class OfiLoop final : public NicLoop, private CompletionSink {
 public:
  static Result<std::unique_ptr<NicLoop>> open(const std::shared_ptr<const OpenDomain>& domain,
                                               Poller& poller);
  ~OfiLoop() override;
  OfiLoop(const OfiLoop&) = delete;
  OfiLoop& operator=(const OfiLoop&) = delete;

  Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion& region,
                                                           MemoryWay way) override;
  Result<void> write(const NicRegistration& source, std::uint64_t from, const RemoteKey& to,
                     std::uint32_t bytes) override;

 private:
  OfiLoop(std::shared_ptr<const OpenDomain> domain, Poller& poller)
      : domain_(std::move(domain)), poller_(poller) {}
  Result<void> start();
  void on_written(std::uint64_t sequence) override { written_ = sequence; }
  void on_arrived(Imm, std::uint64_t) override {}
  void on_failed(Error error) override { failed_ = std::move(error); }

  std::shared_ptr<const OpenDomain> domain_;
  Poller& poller_;
  std::shared_ptr<Endpoint> from_;
  std::shared_ptr<Endpoint> to_;
  std::uint64_t posted_ = 0;
  std::uint64_t written_ = 0;
  std::optional<Error> failed_;
};

}  // namespace kvxfer::ofi
