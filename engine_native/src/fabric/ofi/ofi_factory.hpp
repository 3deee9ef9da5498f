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
  // Against what the provider and the options suggest; for tests.
  struct Overrides {
    bool wait_object = true;
    std::optional<FabricUse> use;
    std::shared_ptr<const Libfabric> library;  // of simulated devices
  };
  OfiFactory() = default;
  explicit OfiFactory(Overrides overrides) : overrides_(std::move(overrides)) {}

  // By options.ofi, ofi_provider, ofi_endpoints, ofi_strict and nics.
  Result<OpenedNics> open(const NicContext& context) override;

 private:
  Overrides overrides_{};
};

// Whether a NIC of this host is driven by efa. Does not need libfabric.
bool efa_device_present();

}  // namespace kvxfer::ofi
