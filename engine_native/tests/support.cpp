// doctest's own code, with its main(), and shared parts of the tests.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "support.hpp"

#include <poll.h>
#include <spawn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ctime>
#include <numeric>
#include <thread>

#include "clock.hpp"

namespace kvxfer::test {

PagedWrite same_pages(std::uint64_t length, const std::vector<std::int64_t>& pages) {
  return {.page_length = length,
          .source_pages = pages,
          .destination_pages = pages,
          .source_stride = length,
          .destination_stride = length};
}

TestEngine::TestEngine(EngineOptions options)
    : engine_(good(TransferEngine::create(std::move(options)))) {}

Completion TestEngine::await(const std::function<bool(const Completion&)>& fits, Duration within) {
  const std::uint64_t deadline = now_ns() + static_cast<std::uint64_t>(within.count());
  while (true) {
    for (auto& completion : engine_->drain()) seen_.push_back(std::move(completion));
    const auto found = std::find_if(seen_.begin(), seen_.end(), fits);
    if (found != seen_.end()) {
      Completion completion = std::move(*found);
      seen_.erase(found);
      return completion;
    }
    const std::uint64_t now = now_ns();
    REQUIRE_MESSAGE(now < deadline, "no such completion before the deadline");
    if (meanwhile) {
      meanwhile();
      continue;
    }
    pollfd event{.fd = engine_->event_fd(), .events = POLLIN, .revents = 0};
    ::poll(&event, 1, static_cast<int>((deadline - now) / 1'000'000 + 1));
  }
}

Completion TestEngine::await(Completion::Kind kind, std::uint64_t id, Duration deadline) {
  return await([&](const Completion& c) { return c.kind == kind && c.id == id; }, deadline);
}

Completion TestEngine::await(Completion::Kind kind) {
  return await([&](const Completion& c) { return c.kind == kind; });
}

PeerId TestEngine::connect_to(TestEngine& other) {
  const auto id = engine_->connect(other->address(), kDeadline);
  const Completion completion = await(Completion::Kind::connect, id);
  REQUIRE_MESSAGE(completion.code == Errc::ok, completion.text);
  return completion.peer;
}

Pair::Pair(const std::string& fabric, unsigned lanes)
    : writer([&] {
        auto options = options_for(fabric, "writer");
        options.tuning.lanes = lanes;
        return options;
      }()),
      reader(options_for(fabric, "reader")),
      to_reader(writer.connect_to(reader)),
      to_writer(reader.await(Completion::Kind::peer_up).peer) {}

void write_and_count(TestEngine& writer, PeerId to, TestEngine& reader, const RegionPtr& source,
                     const RegionPtr& destination, const SingleWrite& write) {
  const Imm imm = good(reader->allocate_counter());
  const auto submitted = good(writer->write(to, source, destination->descriptor(), write,
                                            {.imm = imm, .timeout = kDeadline}));
  good(reader->expect(imm, submitted.immediates));
  CHECK(reader.await(Completion::Kind::counter, imm).code == Errc::ok);
  const auto done = writer.await(Completion::Kind::write, submitted.id);
  CHECK_MESSAGE(done.code == Errc::ok, done.text);
  reader->release_counter(imm);
}

pid_t start_case(const std::string& name) {
  const std::string filter = "--test-case=" + name;
  std::array<const char*, 5> arguments{"/proc/self/exe", "--no-skip", "--no-version",
                                       filter.c_str(), nullptr};
  pid_t child = 0;
  REQUIRE(::posix_spawn(&child, arguments[0], nullptr, nullptr,
                        const_cast<char* const*>(arguments.data()), environ) == 0);
  return child;
}

bool comes_to_rest() {
  const auto used = [] {
    timespec spent{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
    return std::chrono::seconds(spent.tv_sec) + std::chrono::nanoseconds(spent.tv_nsec);
  };
  const std::uint64_t deadline = now_ns() + static_cast<std::uint64_t>(kDeadline.count());
  while (now_ns() < deadline) {
    const auto before = used();
    const std::uint64_t begun = now_ns();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const auto passed = std::chrono::nanoseconds(now_ns() - begun);
    if (2 * (used() - before) < passed) return true;
  }
  return false;
}

Random::Random() {
  const char* given = std::getenv("KVXFER_TEST_SEED");
  seed = given ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  engine.seed(seed);
}

std::uint64_t Random::below(std::uint64_t end) {
  return std::uniform_int_distribution<std::uint64_t>(0, end - 1)(engine);
}

std::vector<std::int64_t> Random::distinct_pages(std::size_t count, std::size_t pool) {
  std::vector<std::int64_t> pages(pool);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), engine);
  pages.resize(count);
  return pages;
}

void Random::fill(std::byte* data, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) data[i] = static_cast<std::byte>(engine());
}

}  // namespace kvxfer::test
