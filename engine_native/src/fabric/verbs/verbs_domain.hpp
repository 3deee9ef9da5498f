// One RDMA NIC. Engine thread only, except registering memory.
#pragma once

#include <memory>
#include <string>

#include "fabric/nic/gpu_ways.hpp"
#include "fabric/nic/nic_domain.hpp"
#include "fabric/verbs/verbs_path.hpp"
#include "thread_owner.hpp"

namespace kvxfer::verbs {

class VerbsDomain final : public NicDomain, private AsyncEventHandler {
 public:
  static Result<std::unique_ptr<NicDomain>> open(const std::shared_ptr<const VerbsDevice>& device,
                                                 const NicContext& context);

  std::string_view fabric() const override { return "verbs"; }
  const NicInfo& info() const override { return info_; }
  bool usable() const override { return nic_.usable(); }
  bool keeps_order() const override { return true; }  // reliable connections
  bool knows_gpus() const override { return true; }
  Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion& region) override;
  std::uint64_t max_window() const override;
  void open_path(NicPathIdentity identity, Opened then) override;
  void poll() override;
  bool prepare_sleep() override;
  void finish_sleep() override {}

 private:
  VerbsDomain(std::shared_ptr<const VerbsDevice> device, const NicContext& context,
              const Port& port);
  void on_async_event(const ibv_async_event& event) override;
  void refresh_port();
  void break_down(const std::string& why);
  void end_paths(const std::string& why);

  [[no_unique_address]] ThreadOwner thread_;
  NicInfo info_;
  VerbsNic nic_;
  GpuWays gpu_ways_;
};

}  // namespace kvxfer::verbs
