// NICs that move nothing (null_nic.hpp): what an engine costs without one.
#pragma once

#include <memory>

#include "fabric/nic/nic_domain.hpp"
#include "fabric/null/null_nic.hpp"

namespace kvxfer::null {

// A network of them: engines that are made with the same factory have one NIC each on it.
class NullFactory final : public NicFactory {
 public:
  // Whether they keep the order of a path's writes.
  explicit NullFactory(bool keeps_order) : keeps_order_(keeps_order) {}
  Result<OpenedNics> open(const NicContext& context) override;

 private:
  std::shared_ptr<NullNics> nics_ = std::make_shared<NullNics>();
  bool keeps_order_;
};

}  // namespace kvxfer::null
