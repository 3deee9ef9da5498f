// Completions on their way to the caller. Any thread.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "fd.hpp"
#include "kvxfer/types.hpp"

namespace kvxfer {

class CompletionQueue {
 public:
  // `signals`: event_fd() becomes readable. Without them, completions cost no system call.
  static Result<std::unique_ptr<CompletionQueue>> create(bool signals = true);

  // Stamps the completion with the current time unless it carries one.
  void push(Completion completion);
  std::vector<Completion> drain();
  // Removes completions of this kind and id that were not drained.
  void take_back(Completion::Kind kind, std::uint64_t id);
  // The bytes of waiting messages; empty ones count, too.
  std::size_t waiting_bytes() const;
  // A descriptor that is readable while completions wait.
  int event_fd() const { return event_.get(); }

 private:
  CompletionQueue(UniqueFd event, bool signals) : event_(std::move(event)), signals_(signals) {}

  UniqueFd event_;
  const bool signals_;
  mutable std::mutex mutex_;
  std::vector<Completion> waiting_;
  std::size_t waiting_bytes_ = 0;
};

}  // namespace kvxfer
