// Work on other threads, and its follow-up on this thread.
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "background.hpp"
#include "clock.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

TEST_SUITE_BEGIN("background");

namespace {

void finish_all(Background& background) {
  while (!background.idle()) {
    if (background.finish() == 0) std::this_thread::yield();
  }
}

}  // namespace

TEST_CASE("work runs on another thread, and its follow-up on the thread that finishes it") {
  Poller poller = good(Poller::create());
  Background background(poller);
  const auto self = std::this_thread::get_id();
  std::thread::id worked;
  std::thread::id followed;
  background.run<std::thread::id>([] { return std::this_thread::get_id(); },
                                  [&](std::thread::id id) {
                                    worked = id;
                                    followed = std::this_thread::get_id();
                                  });
  CHECK(!background.idle());
  finish_all(background);
  CHECK(worked != self);
  CHECK(followed == self);
  CHECK(!background.ready());
}

TEST_CASE("work that takes long does not delay other work, and all of it ends") {
  Poller poller = good(Poller::create());
  Background background(poller);
  constexpr int kJobs = 200;
  std::latch slow(1);
  int ended = 0;
  background.run([&] { slow.wait(); }, [&] { ++ended; });
  for (int i = 1; i < kJobs; ++i) background.run([] {}, [&] { ++ended; });
  while (ended < kJobs - 1) {
    if (background.finish() == 0) std::this_thread::yield();
  }
  CHECK(!background.idle());
  slow.count_down();
  finish_all(background);
  CHECK(ended == kJobs);
}

TEST_CASE("a fence ends even if all other work waits for ever") {
  Poller poller = good(Poller::create());
  std::latch answer(1);
  Background background(poller);
  constexpr int kJobs = 64;
  int ended = 0;
  for (int i = 0; i < kJobs; ++i) background.run([&] { answer.wait(); }, [&] { ++ended; });
  bool fenced = false;
  background.fence<int>([] { return 7; }, [&](int got) { fenced = got == 7; });
  const std::uint64_t deadline = now_ns() + static_cast<std::uint64_t>(kDeadline.count());
  while (!fenced && now_ns() < deadline) {
    if (background.finish() == 0) std::this_thread::yield();
  }
  CHECK(fenced);
  CHECK(ended == 0);
  answer.count_down();
  finish_all(background);
  CHECK(ended == kJobs);
}

TEST_CASE("a follow-up may start more work, and the poller wakes for it") {
  Poller poller = good(Poller::create());
  Background background(poller);
  int rounds = 0;
  const std::function<void()> next = [&] {
    if (++rounds < 100) background.run([] {}, next);
  };
  background.run([] {}, next);
  while (!background.idle()) {
    if (!background.ready()) poller.poll(static_cast<std::uint64_t>(kDeadline.count()));
    background.finish();
  }
  CHECK(rounds == 100);
}

TEST_CASE("destroying it drops all that its work holds") {
  Poller poller = good(Poller::create());
  auto held = std::make_shared<int>(0);
  std::latch begun(64);
  std::latch leave(1);
  std::jthread leaving;
  {
    Background background(poller);
    for (int i = 0; i < 64; ++i) {
      background.run(
          [&] {
            begun.count_down();
            leave.wait();
          },
          [] {});
    }
    begun.wait();  // all threads are busy
    background.run([held] {}, [held] {});
    CHECK(held.use_count() == 3);
    leaving = std::jthread([&] { leave.count_down(); });
  }
  CHECK(held.use_count() == 1);
}

TEST_SUITE_END();
