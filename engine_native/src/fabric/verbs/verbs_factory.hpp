// Opens the host's RDMA NICs.
#pragma once

#include <memory>
#include <vector>

#include "fabric/nic/nic_domain.hpp"

namespace kvxfer::verbs {

class VerbsFactory final : public NicFactory {
 public:
  // Those in options.nics; if that is empty, all that have an InfiniBand or Ethernet port.
  Result<std::vector<std::unique_ptr<NicDomain>>> open(const NicContext& context) override;
};

}  // namespace kvxfer::verbs
