// Connect operations that wait for the same connection, each with its own deadline. When the last
// one has passed, the connection is not wanted any more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvxfer/types.hpp"

namespace kvxfer {

class ConnectWaiters {
 public:
  void add(OperationId id, std::uint64_t deadline_ns) { waiting_.push_back({id, deadline_ns}); }

  bool empty() const { return waiting_.empty(); }

  std::vector<OperationId> take() {
    return take_if([](const Waiter&) { return true; });
  }
  std::vector<OperationId> take_late(std::uint64_t now) {
    return take_if([now](const Waiter& waiter) { return now > waiter.deadline_ns; });
  }

 private:
  struct Waiter {
    OperationId id;
    std::uint64_t deadline_ns;
  };

  template <class Predicate>
  std::vector<OperationId> take_if(Predicate predicate) {
    std::vector<OperationId> taken;
    std::erase_if(waiting_, [&](const Waiter& waiter) {
      if (!predicate(waiter)) return false;
      taken.push_back(waiter.id);
      return true;
    });
    return taken;
  }

  std::vector<Waiter> waiting_;
};

}  // namespace kvxfer
