// A NIC that moves nothing and completes at once: what an engine costs without one.
#pragma once

#include <memory>
#include <vector>

#include "fabric/nic/nic_domain.hpp"

namespace kvxfer::null {

class NullFactory final : public NicFactory {
 public:
  Result<std::vector<std::unique_ptr<NicDomain>>> open(const NicContext& context) override;
};

}  // namespace kvxfer::null
