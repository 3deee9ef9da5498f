// Shared parts of the engine's tests: connected engines, waits for completions, random pages.
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "conformance.hpp"
#include "kvxfer/engine.hpp"
#include "memory_region.hpp"

namespace kvxfer::test {

// Long enough on a busy machine for what an idle machine does at once.
inline constexpr Duration kDeadline = std::chrono::minutes(2);
// The sizes that most cases of the NIC fabrics write.
inline constexpr std::size_t kPage = 4096;
inline constexpr std::size_t kPages = 1024;

using Bytes = std::vector<std::byte>;

// Writes each of these pages to the page of the same number.
PagedWrite same_pages(std::uint64_t length, const std::vector<std::int64_t>& pages);

// An engine, and completions that the test has not taken yet.
class TestEngine {
 public:
  explicit TestEngine(EngineOptions options);

  TransferEngine& operator*() { return *engine_; }
  TransferEngine* operator->() { return engine_.get(); }

  // Returns the first completion that fits; fails the test if none comes.
  Completion await(const std::function<bool(const Completion&)>& fits,
                   Duration deadline = kDeadline);
  Completion await(Completion::Kind kind, std::uint64_t id, Duration deadline = kDeadline);
  Completion await(Completion::Kind kind);
  // Connects and returns the peer's id here.
  PeerId connect_to(TestEngine& other);
  // Called by await() until there may be a completion. Unless it is set, await() sleeps.
  std::function<void()> meanwhile;

 private:
  std::unique_ptr<TransferEngine> engine_;
  std::vector<Completion> seen_;
};

// Two connected engines over one fabric; `writer` was the initiator.
struct Pair {
  explicit Pair(const std::string& fabric, unsigned lanes = 2);
  TestEngine writer;
  TestEngine reader;
  PeerId to_reader;
  PeerId to_writer;
};

// Writes with a counter, and returns once the reader has seen it, so that its bytes may be read.
void write_and_count(TestEngine& writer, PeerId to, TestEngine& reader, const RegionPtr& source,
                     const RegionPtr& destination, const SingleWrite& write);

// Runs a case of this program in another process.
pid_t start_case(const std::string& name);

// True if this process comes to rest: for a tenth of a second it uses less than half a core.
bool comes_to_rest();

// Prints its seed when a test fails.
struct Random {
  Random();
  std::uint64_t below(std::uint64_t end);
  std::vector<std::int64_t> distinct_pages(std::size_t count, std::size_t pool);
  void fill(std::byte* data, std::size_t size);
  std::uint64_t seed;
  std::mt19937_64 engine;
};

template <class T>
T good(Result<T> result) {
  if (!result) FAIL(result.error().text);
  return std::move(*result);
}
inline void good(Result<void> result) {
  if (!result) FAIL(result.error().text);
}

}  // namespace kvxfer::test
