// Joining a queue pair asks the kernel for the peer NIC's hardware address. Where that is not known
// yet the kernel asks the network, and waits a second and more if nobody answers: too long for the
// engine thread, whose silence its peers would take for death. Engine thread only.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace kvxfer::verbs {

class AddressLookups {
 public:
  using Running = std::atomic<unsigned>;
  // `running`: how many there are over all NICs of the engine, whose one thread waits for them.
  explicit AddressLookups(std::shared_ptr<Running> running) : running_(std::move(running)) {}

  // Runs it on a thread of its own, drops it, then hands over its result.
  std::future<int> run(std::function<int()> lookup);
  // Whether any has not ended, of any NIC.
  bool pending() const { return *running_ > 0; }

 private:
  struct Lookup {
    std::shared_ptr<std::atomic<bool>> ended;
    std::jthread thread;
  };
  std::shared_ptr<Running> running_;
  std::vector<Lookup> lookups_;
};

}  // namespace kvxfer::verbs
