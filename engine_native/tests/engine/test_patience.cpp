// The time that a silent peer is waited for: a starved peer is not dead.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>

#include "patience.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint64_t kLimit = 700 * kMs;
constexpr std::uint64_t kStart = 1'000'000 * kMs;

// A process whose only thread has the name of an engine's thread.
class Child {
 public:
  explicit Child(const std::function<void()>& again) {
    std::array<char, 16> name;
    ::prctl(PR_GET_NAME, name.data());
    ::prctl(PR_SET_NAME, kEngineThreadName);  // before the fork, so that the child always has it
    pid_ = ::fork();
    while (pid_ == 0) again();
    ::prctl(PR_SET_NAME, name.data());
    REQUIRE(pid_ > 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  pid_t pid() const { return pid_; }
  bool comes_to(EngineThreads state) const {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    while (engine_threads_of(pid_) != state) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      ::usleep(1000);
    }
    return true;
  }

 private:
  pid_t pid_ = 0;
};

// The patience with a peer that has sent one heartbeat, `gap_ns` after it connected.
Patience heard_after(std::uint64_t gap_ns) {
  Patience patience(kStart);
  patience.hear(kStart + gap_ns);
  return patience;
}

}  // namespace

TEST_CASE("the kernel reports whether the engine of a process was stopped or has no core") {
  const Child sleeper([] { ::pause(); });
  CHECK(sleeper.comes_to(EngineThreads::unknown));
  REQUIRE(::kill(sleeper.pid(), SIGSTOP) == 0);
  CHECK(sleeper.comes_to(EngineThreads::stopped));

  const Child runner([] {});
  CHECK(runner.comes_to(EngineThreads::want_core));
  REQUIRE(::kill(runner.pid(), SIGSTOP) == 0);
  CHECK(runner.comes_to(EngineThreads::stopped));
  REQUIRE(::kill(runner.pid(), SIGCONT) == 0);
  CHECK(runner.comes_to(EngineThreads::want_core));

  CHECK(engine_threads_of(0) == EngineThreads::unknown);
  CHECK(engine_threads_of(1 << 30) == EngineThreads::unknown);  // no such process
}

TEST_CASE("a silent peer that was stopped ends at the limit, one without a core at three limits") {
  const auto patience = heard_after(600 * kMs);
  const std::uint64_t heard = kStart + 600 * kMs;
  const Child runner([] {});
  REQUIRE(runner.comes_to(EngineThreads::want_core));
  CHECK_FALSE(patience.ends(kLimit, runner.pid(), heard + kLimit));
  CHECK_FALSE(patience.ends(kLimit, runner.pid(), heard + 3 * kLimit));
  CHECK(patience.ends(kLimit, runner.pid(), heard + 3 * kLimit + 1));

  REQUIRE(::kill(runner.pid(), SIGSTOP) == 0);
  REQUIRE(runner.comes_to(EngineThreads::stopped));
  CHECK_FALSE(patience.ends(kLimit, runner.pid(), heard + kLimit));
  CHECK(patience.ends(kLimit, runner.pid(), heard + kLimit + 1));
}

TEST_CASE("a peer of another host that was late before gets twice as long as that") {
  SUBCASE("never late") {
    const auto patience = heard_after(120 * kMs);
    CHECK_FALSE(patience.ends(kLimit, 0, kStart + 120 * kMs + kLimit));
    CHECK(patience.ends(kLimit, 0, kStart + 120 * kMs + kLimit + 1));
  }
  SUBCASE("late once, even if it was in time since") {
    auto patience = heard_after(600 * kMs);
    patience.hear(kStart + 700 * kMs);
    CHECK_FALSE(patience.ends(kLimit, 0, kStart + 1900 * kMs));
    CHECK(patience.ends(kLimit, 0, kStart + 1900 * kMs + 1));
  }
  SUBCASE("never longer than three limits") {
    const auto patience = heard_after(5000 * kMs);
    CHECK_FALSE(patience.ends(kLimit, 0, kStart + 5000 * kMs + 3 * kLimit));
    CHECK(patience.ends(kLimit, 0, kStart + 5000 * kMs + 3 * kLimit + 1));
  }
  SUBCASE("forgotten after a minute in time") {
    auto patience = heard_after(600 * kMs);
    std::uint64_t at = kStart + 600 * kMs;
    while (at < kStart + 62'000 * kMs) patience.hear(at += 100 * kMs);
    CHECK(patience.ends(kLimit, 0, at + kLimit + 1));
  }
}

TEST_CASE("time in which this engine did not run does not count as a peer's silence") {
  auto patience = heard_after(100 * kMs);
  const std::uint64_t now = kStart + 3000 * kMs;
  patience.forgive(2800 * kMs, now);
  CHECK(patience.silence(now) == 100 * kMs);
  patience.hear(now);
  CHECK(patience.ends(kLimit, 0, now + kLimit + 1));  // it does not count as lateness either
  patience.forgive(10'000 * kMs, now + 1);
  CHECK(patience.silence(now + 1) == 0);
}
