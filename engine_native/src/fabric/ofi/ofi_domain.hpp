// A NIC over libfabric: its domain, its endpoints, its paths.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fabric/nic/gpu_ways.hpp"
#include "fabric/nic/nic_domain.hpp"
#include "fabric/ofi/endpoint.hpp"
#include "fabric/ofi/ofi_registration.hpp"
#include "fd.hpp"
#include "thread_owner.hpp"

namespace kvxfer::ofi {

class OfiPath;

class OfiDomain final : public NicDomain, private EventSink {
 public:
  struct Settings {
    bool wait_object = true;
    bool strict = false;  // keeps to EFA's limits, and disorders completions
  };

  static Result<std::unique_ptr<OfiDomain>> open(std::shared_ptr<const OpenDomain> domain,
                                                 const NicContext& context, NicInfo info,
                                                 const Settings& settings);
  ~OfiDomain() override;

  std::string_view fabric() const override { return "ofi"; }
  const NicInfo& info() const override { return info_; }
  bool usable() const override { return usable_; }
  bool keeps_order() const override { return false; }
  bool keeps_arrivals() const override { return false; }  // fi_endpoint(3)
  bool knows_gpus() const override { return true; }
  Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion& region) override;
  void open_path(NicPathIdentity identity, Opened then) override;
  void poll() override;
  bool prepare_sleep() override;
  void finish_sleep() override {}

  // --- for its paths
  const NicContext& context() const { return context_; }
  NicLoad& load() { return load_; }
  std::string text_of(ssize_t error) const { return domain_->library.failed("", error).text; }
  void add(OfiPath& path) { paths_.push_back(&path); }
  void remove(OfiPath& path) { std::erase(paths_, &path); }
  // Returns null if closing a key stops a write that is being placed.
  Flushes* flushes() const { return flushes_.get(); }
  // Ends a path's endpoint.
  void take_back(std::shared_ptr<Endpoint> endpoint);

 private:
  OfiDomain(std::shared_ptr<const OpenDomain> domain, const NicContext& context, NicInfo info,
            const Settings& settings);
  Endpoint::Options endpoint_options() const;
  void break_down(const Error& why);
  void check_device();
  void set_timer(std::uint64_t ns);
  void on_events(std::uint32_t) override;

  [[no_unique_address]] ThreadOwner thread_;
  std::shared_ptr<const OpenDomain> domain_;
  NicContext context_;
  Settings settings_;
  NicInfo info_;
  NicLoad load_;
  bool usable_ = true;
  std::vector<OfiPath*> paths_;  // owned by their links
  std::size_t endpoints_ = 0;    // including those that are being made or destroyed
  std::uint32_t polls_ = 0;
  std::uint64_t seen_activity_ = 0;
  std::uint64_t nap_ns_ = 0;
  UniqueFd timer_;
  std::shared_ptr<Flushes> flushes_;
  GpuWays gpu_ways_;
};

}  // namespace kvxfer::ofi
