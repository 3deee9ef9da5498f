// Opens the host's RDMA NICs.
#pragma once

#include "fabric/nic/nic_domain.hpp"

namespace kvxfer::verbs {

class VerbsFactory final : public NicFactory {
 public:
  // Those in options.nics; if that is empty, all that have an InfiniBand or Ethernet port.
  Result<OpenedNics> open(const NicContext& context) override;
};

}  // namespace kvxfer::verbs
