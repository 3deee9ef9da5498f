// Parts of error texts. Any thread.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>
#include <vector>

namespace kvxfer {

inline std::string errno_text(int error = errno) { return std::generic_category().message(error); }

// Joins names to a list: "a, b, c".
inline std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace kvxfer
