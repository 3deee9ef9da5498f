// The NICs that libfabric reaches: EFA, and its tcp provider for tests.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "fabric/nic/nic_domain.hpp"

namespace kvxfer::ofi {

struct Libfabric;

class OfiFactory final : public NicFactory {
 public:
  // Settings in place of those that the provider and the options suggest; for tests.
  struct Overrides {
    bool wait_object = true;
    std::optional<FabricUse> use;
    std::shared_ptr<const Libfabric> library;  // a library of simulated devices
  };
  OfiFactory() = default;
  explicit OfiFactory(Overrides overrides) : overrides_(std::move(overrides)) {}

  // Opens NICs as options.ofi, ofi_provider, ofi_endpoints, ofi_strict and nics say.
  Result<OpenedNics> open(const NicContext& context) override;

 private:
  Overrides overrides_{};
};

// True if efa drives a NIC of this host. Does not need libfabric.
bool efa_device_present();

}  // namespace kvxfer::ofi
