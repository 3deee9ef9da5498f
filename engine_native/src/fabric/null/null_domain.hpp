// NICs that move nothing (null_nic.hpp), to measure what an engine costs without one.
#pragma once

#include <memory>

#include "fabric/nic/nic_domain.hpp"
#include "fabric/null/null_nic.hpp"

namespace kvxfer::null {

// A network of such NICs: each engine that is made with the same factory has one NIC on it.
class NullFactory final : public NicFactory {
 public:
  // `keeps_order`: the NICs keep the order of a path's writes.
  explicit NullFactory(bool keeps_order) : keeps_order_(keeps_order) {}
  Result<OpenedNics> open(const NicContext& context) override;

 private:
  std::shared_ptr<NullNics> nics_ = std::make_shared<NullNics>();
  bool keeps_order_;
};

}  // namespace kvxfer::null
