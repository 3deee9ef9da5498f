// A NIC over libfabric: its domain, its endpoints, its paths.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fabric/nic/nic_domain.hpp"
#include "fabric/ofi/endpoint.hpp"
#include "fabric/ofi/ofi_registration.hpp"
#include "fd.hpp"

namespace kvxfer::ofi {

class OfiPath;

// Immediates of one path's peer that may be under way.
inline constexpr std::uint64_t kImmWindow = 256;

class OfiDomain final : public NicDomain, private EventSink {
 public:
  struct Settings {
    std::size_t paths_per_endpoint;
    bool wait_object = true;
    bool strict = false;  // held to EFA's limits and disorder
  };

  static Result<std::unique_ptr<OfiDomain>> open(std::shared_ptr<const OpenDomain> domain,
                                                 const NicContext& context, NicInfo info,
                                                 const Settings& settings);
  ~OfiDomain() override;

  std::string_view fabric() const override { return "ofi"; }
  const NicInfo& info() const override { return info_; }
  bool usable() const override { return usable_; }
  Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion& region) override;
  void open_path(NicPathIdentity identity, Opened then) override;
  void poll() override;
  bool prepare_sleep() override;
  void finish_sleep() override {}

  // --- for its paths
  struct Place {
    Endpoint* endpoint;
    Endpoint::Landing landing;
  };
  const NicContext& context() const { return context_; }
  NicLoad& load() { return load_; }
  std::string text_of(ssize_t error) const { return domain_->library.failed("", error).text; }
  void add(OfiPath& path) { paths_.push_back(&path); }
  void remove(OfiPath& path) { std::erase(paths_, &path); }
  // Null where keys fence.
  Flushes* flushes() const { return flushes_.get(); }
  // A place at an endpoint that has not met that one yet, for one that has.
  Result<Place> exchange(Endpoint& endpoint, std::uint64_t token);
  // Nothing that the peer writes through the endpoint lands any more.
  void fence(Endpoint& endpoint, PeerId peer);
  // Takes a path's place back.
  void release(Endpoint& endpoint);

 private:
  OfiDomain(std::shared_ptr<const OpenDomain> domain, const NicContext& context, NicInfo info,
            const Settings& settings);
  bool shares_endpoints() const { return settings_.paths_per_endpoint > 1; }
  Result<Place> find_place(std::uint64_t unmet);
  void break_down(const Error& why);
  void check_device();
  void close_parked();
  void set_timer(std::uint64_t ns);
  void on_events(std::uint32_t) override;

  std::shared_ptr<const OpenDomain> domain_;
  NicContext context_;
  Settings settings_;
  NicInfo info_;
  NicLoad load_;
  bool usable_ = true;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  std::vector<OfiPath*> paths_;  // owned by their links
  std::uint32_t polls_ = 0;
  std::uint64_t seen_activity_ = 0;
  std::uint64_t nap_ns_ = 0;
  UniqueFd timer_;
  std::mutex registrations_mutex_;
  std::vector<std::weak_ptr<OfiRegistration>> registrations_;  // guarded; to be fenced
  std::shared_ptr<Flushes> flushes_;
};

}  // namespace kvxfer::ofi
