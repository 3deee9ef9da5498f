// One RDMA NIC. Engine thread only, except registering memory.
#pragma once

#include <memory>
#include <string>

#include "fabric/nic/nic_domain.hpp"
#include "fabric/verbs/verbs_path.hpp"

namespace kvxfer::verbs {

class VerbsDomain final : public NicDomain, private AsyncEventHandler {
 public:
  // `lookups`: shared by all NICs of the engine.
  static Result<std::unique_ptr<NicDomain>> open(
      const std::shared_ptr<const VerbsDevice>& device, const NicContext& context,
      const std::shared_ptr<AddressLookups::Running>& lookups);

  std::string_view fabric() const override { return "verbs"; }
  const NicInfo& info() const override { return info_; }
  bool usable() const override { return nic_.port.active && !nic_.broken; }
  Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion& region) override;
  std::uint64_t max_window() const override;
  Result<std::unique_ptr<NicPath>> open_path(NicPathIdentity identity) override;
  void poll() override;
  bool prepare_sleep() override;
  void finish_sleep() override {}

 private:
  VerbsDomain(std::shared_ptr<const VerbsDevice> device, const NicContext& context,
              const Port& port, std::shared_ptr<AddressLookups::Running> lookups);
  void on_async_event(const ibv_async_event& event) override;
  void refresh_port();
  void break_down(const std::string& why);
  void end_paths(const std::string& why);

  NicInfo info_;
  VerbsNic nic_;
};

}  // namespace kvxfer::verbs
