#include "debug/planted.hpp"

#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "support.hpp"
#include "thread_owner.hpp"

namespace kvxfer::test {

static_assert(kChecksThreads || (std::is_empty_v<ThreadOwner> && std::is_empty_v<OneAtATime>),
              "a release build has no checks");

namespace {

constexpr const char* kPlanted = "KVXFER_PLANTED";

struct Ended {
  bool aborted = false;
  std::string said;
};

// Runs this program again, with that mistake of a list.
Ended run_with(const std::string& list, std::size_t number) {
  std::array<char, 4096> program{};
  REQUIRE(::readlink("/proc/self/exe", program.data(), program.size() - 1) > 0);
  const std::string command = std::string(kPlanted) + "=" + list + std::to_string(number) + " '" +
                              program.data() +
                              "' --no-version --no-skip --test-case='a planted mistake' 2>&1";
  FILE* const out = ::popen(command.c_str(), "r");
  REQUIRE(out != nullptr);
  Ended ended;
  std::array<char, 4096> some{};
  while (const std::size_t got = std::fread(some.data(), 1, some.size(), out)) {
    ended.said.append(some.data(), got);
  }
  const int status = ::pclose(out);
  const int by_shell = 128 + SIGABRT;
  ended.aborted = (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT) ||
                  (WIFEXITED(status) && WEXITSTATUS(status) == by_shell);
  return ended;
}

}  // namespace

void check_all(const std::string& list, const std::vector<Mistake>& mistakes) {
  if (!kChecksThreads) {
    MESSAGE("skipped: a release build checks nothing");
    return;
  }
  std::string names;
  for (std::size_t number = 0; number < mistakes.size(); ++number) {
    const std::string name = mistakes[number].name;
    CAPTURE(name);
    const Ended ended = run_with(list, number);
    CHECK_MESSAGE(ended.aborted, ended.said);
    CHECK_MESSAGE(ended.said.find(name) != std::string::npos, ended.said);
    names += "\n  " + name;
  }
  MESSAGE(mistakes.size() << " mistakes end a debug build:" << names);
}

TEST_SUITE_BEGIN("debug checks");

TEST_CASE("a planted mistake" * doctest::skip()) {
  const char* const chosen = std::getenv(kPlanted);
  if (!chosen) return;
  std::signal(SIGABRT, SIG_DFL);  // under ThreadSanitizer, doctest's handler does not work
  const std::string planted = chosen;
  const bool thread = planted.starts_with("thread");
  const auto mistakes = thread ? wrong_threads() : broken_invariants();
  const std::size_t digits = planted.find_first_of("0123456789");
  mistakes.at(std::stoul(planted.substr(digits))).make();
}

TEST_SUITE_END();

}  // namespace kvxfer::test
