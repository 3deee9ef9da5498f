// Opens the host's RDMA NICs.
#pragma once

#include <memory>

#include "fabric/nic/nic_domain.hpp"
#include "fabric/verbs/verbs_library.hpp"

namespace kvxfer::verbs {

class VerbsFactory final : public NicFactory {
 public:
  VerbsFactory() : VerbsFactory(VerbsLibrary::load()) {}
  explicit VerbsFactory(Result<std::shared_ptr<const VerbsLibrary>> library)
      : library_(std::move(library)) {}

  // Opens the NICs in options.nics, named DEVICE or DEVICE:PORT; if that is empty, the first port
  // of every InfiniBand or RoCE device.
  Result<OpenedNics> open(const NicContext& context) override;

 private:
  Result<std::shared_ptr<const VerbsLibrary>> library_;
};

}  // namespace kvxfer::verbs
