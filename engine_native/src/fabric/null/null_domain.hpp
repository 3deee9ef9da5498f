// A NIC that moves nothing (null_nic.hpp): what an engine costs without one.
#pragma once

#include "fabric/nic/nic_domain.hpp"

namespace kvxfer::null {

class NullFactory final : public NicFactory {
 public:
  Result<OpenedNics> open(const NicContext& context) override;
};

}  // namespace kvxfer::null
