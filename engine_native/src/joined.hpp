// A list as a reader wants it in an error text: "a, b, c".
#pragma once

#include <string>
#include <vector>

namespace kvxfer {

inline std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace kvxfer
