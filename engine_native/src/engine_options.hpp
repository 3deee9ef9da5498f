// The bounds of engine options.
#pragma once

#include "kvxfer/types.hpp"

namespace kvxfer {

// Fails with invalid-argument that names the option, its value and the valid values.
Result<void> check_options(const EngineOptions& options);

}  // namespace kvxfer
