// Joining a queue pair asks the kernel for the peer NIC's hardware address. Where that is not known
// yet the kernel asks the network, and waits a second and more if nobody answers: too long for the
// engine thread, whose silence its peers would take for death. Engine thread only.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <vector>

namespace kvxfer::verbs {

class AddressLookups {
 public:
  // Runs it on a thread of its own, drops it, then hands over its result.
  std::future<int> run(std::function<int()> lookup);
  // Whether any has not ended.
  bool pending();

 private:
  struct Lookup {
    std::shared_ptr<std::atomic<bool>> ended;
    std::jthread thread;
  };
  std::vector<Lookup> running_;
};

}  // namespace kvxfer::verbs
