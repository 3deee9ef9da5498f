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
  static Result<std::unique_ptr<CompletionQueue>> create();

  // Stamps the completion with the current time unless it carries one.
  void push(Completion completion);
  std::vector<Completion> drain();
  // Readable while completions wait.
  int event_fd() const { return event_.get(); }

 private:
  explicit CompletionQueue(UniqueFd event) : event_(std::move(event)) {}

  UniqueFd event_;
  std::mutex mutex_;
  std::vector<Completion> waiting_;
};

}  // namespace kvxfer
