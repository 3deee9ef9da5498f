// Memory of finished lists of writes, kept for the next ones: memory that was returned to the
// system comes back as page faults, which cost a caller more than planning does. Any thread.
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

#include "operation.hpp"

namespace kvxfer {

class SpareWrites {
 public:
  static constexpr std::size_t kFewest = 4096;                   // shorter lists are not worth it
  static constexpr std::size_t kMost = std::size_t{512} * 1024;  // in all: 12 MiB

  // Returns an empty list, with room for `count` writes if such a list is kept.
  std::vector<WireWrite> take(std::size_t count) {
    std::vector<WireWrite> taken;
    if (count < kFewest) return taken;
    const std::lock_guard lock(mutex_);
    for (auto& list : lists_) {
      if (list.capacity() < count) continue;
      taken.swap(list);
      list.swap(lists_.back());
      lists_.pop_back();
      kept_ -= taken.capacity();
      break;
    }
    return taken;
  }

  // Keeps the list; the oldest ones make room.
  void keep(std::vector<WireWrite> list) {
    if (list.capacity() < kFewest || list.capacity() > kMost) return;
    list.clear();
    const std::lock_guard lock(mutex_);
    kept_ += list.capacity();
    lists_.push_back(std::move(list));
    for (; kept_ > kMost; lists_.pop_front()) kept_ -= lists_.front().capacity();
  }

 private:
  std::mutex mutex_;
  std::deque<std::vector<WireWrite>> lists_;
  std::size_t kept_ = 0;  // capacity of all
};

}  // namespace kvxfer
