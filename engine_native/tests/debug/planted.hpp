// Mistakes that the checks of debug builds end: each is made by this program, run again with the
// mistake's number, and must end it.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace kvxfer::test {

struct Mistake {
  const char* name;
  std::function<void()> make;
};

// The lists "thread" and "invariant".
std::vector<Mistake> wrong_threads();
std::vector<Mistake> broken_invariants();

// Checks that each of these mistakes ends this program, which then says the mistake's name. Checks
// nothing in a release build.
void check_all(const std::string& list, const std::vector<Mistake>& mistakes);

}  // namespace kvxfer::test
