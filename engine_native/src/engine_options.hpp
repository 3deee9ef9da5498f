// The bounds of engine options.
#pragma once

#include <span>
#include <string_view>

#include "kvxfer/types.hpp"

namespace kvxfer {

// The bounds of an option that is a number, or of the length of one that is text. The default is
// valid even if it is beyond them.
struct OptionBounds {
  std::string_view name;  // "traffic_class", "tuning.lanes"
  double (*value)(const EngineOptions&);
  double least;
  double most;            // infinity: none
  std::string_view unit;  // "", "s" or "bytes"
};

std::span<const OptionBounds> option_bounds();

// Fails with invalid-argument that names the option, its value and the valid values.
Result<void> check_options(const EngineOptions& options);

}  // namespace kvxfer
