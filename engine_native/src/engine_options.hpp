// What an engine may be asked for.
#pragma once

#include "kvxfer/types.hpp"

namespace kvxfer {

// invalid-argument that names the option, its value and what it may be.
Result<void> check_options(const EngineOptions& options);

}  // namespace kvxfer
