// The text of an errno, from any thread.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

namespace kvxfer {

inline std::string errno_text(int error = errno) { return std::generic_category().message(error); }

}  // namespace kvxfer
