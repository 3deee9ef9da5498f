// The error of a write that its receiver refused; the same on every fabric.
#pragma once

#include <string_view>

#include "operation.hpp"

namespace kvxfer {

Error refusal(Errc status, const Operation& operation, std::string_view peer);

}  // namespace kvxfer
