// NICs that move no bytes, but look like NICs to the processor: work requests and completions of 64
// bytes in memory, and a doorbell for each chain of requests. A thread is the other end of both,
// for all NICs of one network.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fd.hpp"
#include "kvxfer/types.hpp"
#include "thread_owner.hpp"

namespace kvxfer::null {

inline constexpr std::size_t kLine = 64;

struct alignas(kLine) WorkRequest {
  std::uint64_t source;
  std::uint64_t address;
  std::uint64_t rkey;
  std::uint64_t completes;  // number that is reported when the request is done; 0: none
  std::uint32_t length;
  Imm imm;
  bool counted;
};
static_assert(sizeof(WorkRequest) == kLine);

struct alignas(kLine) Completion {
  std::uint64_t request;  // a write's number; 0: an immediate came
  std::uint32_t path;
  Imm imm;
  std::atomic<std::uint32_t> turn;  // number of writes of this entry; stored last
};
static_assert(sizeof(Completion) == kLine);

// The completions of one engine's NIC. The NIC writes, the engine reads.
// The two sides write to different lines: NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding)
class CompletionRing {
 public:
  static constexpr std::uint64_t kEntries = 1u << 17;

  // --- the NIC's thread
  bool full() const { return written_ - read_.load(std::memory_order_acquire) >= kEntries; }
  void push(std::uint64_t request, std::uint32_t path, Imm imm);
  // Wakes an engine that sleeps over completions.
  void wake_if_armed();

  // --- the engine's thread
  // Returns the next completion; null if there is none.
  const Completion* front() const;
  void pop() {
    engine_thread_.check("CompletionRing");
    ++next_;
  }
  // Lets popped entries be written again.
  void give_back() { read_.store(next_, std::memory_order_release); }
  int event() const { return event_.get(); }
  void arm() { armed_.store(true, std::memory_order_release); }

  Result<void> open();

 private:
  static std::uint32_t turn_of(std::uint64_t position) {
    return static_cast<std::uint32_t>(position / kEntries + 1);
  }

  [[no_unique_address]] ThreadOwner nic_thread_;
  [[no_unique_address]] ThreadOwner engine_thread_;
  std::vector<Completion> entries_{kEntries};
  alignas(kLine) std::uint64_t written_ = 0;
  alignas(kLine) std::uint64_t next_ = 0;
  alignas(kLine) std::atomic<std::uint64_t> read_ = 0;
  std::atomic<bool> armed_ = false;
  UniqueFd event_;
};

// One end of a path, like a queue pair.
// The two sides write to different lines: NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding)
class SendQueue {
 public:
  static constexpr std::uint32_t kEntries = 256;

  explicit SendQueue(CompletionRing& completions) : completions_(completions) {}

  // --- the engine's thread
  WorkRequest& next() {
    engine_thread_.check("SendQueue");
    return requests_[posted_++ % kEntries];
  }
  void ring_doorbell() { doorbell_.store(posted_, std::memory_order_release); }

  // --- the NIC's thread
  // Serves posted requests. Returns true if there were any.
  bool serve(std::uint32_t path, CompletionRing* peers, std::uint32_t peers_path);

 private:
  [[no_unique_address]] ThreadOwner nic_thread_;
  [[no_unique_address]] ThreadOwner engine_thread_;
  CompletionRing& completions_;
  std::array<WorkRequest, kEntries> requests_{};
  std::uint64_t posted_ = 0;
  alignas(kLine) std::atomic<std::uint64_t> doorbell_ = 0;
  alignas(kLine) std::uint64_t served_ = 0;
};

// The NICs' thread, and the paths that it serves. Any thread may call it.
class NullNics {
 public:
  NullNics();

  void add(CompletionRing& ring);
  void remove(CompletionRing& ring);
  // Returns the number of the path.
  std::uint32_t add(SendQueue& queue, CompletionRing& ring);
  // endpoint() describes a path of this network; join() joins a path to another, and returns false
  // if the other is not of this network.
  std::string endpoint(std::uint32_t path) const;
  bool join(std::uint32_t path, std::string_view endpoint);
  void remove(std::uint32_t path);

 private:
  struct Path {
    SendQueue* queue;
    CompletionRing* ring;
    std::uint32_t peer = 0;
  };
  void run(const std::stop_token& stop);
  bool serve_all();

  std::uint64_t network_ = 0;  // random
  std::mutex mutex_;           // held while it serves
  std::unordered_map<std::uint32_t, Path> paths_;
  std::vector<CompletionRing*> rings_;
  std::uint32_t last_ = 0;
  std::jthread thread_;
};

}  // namespace kvxfer::null
