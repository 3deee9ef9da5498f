#include "completion_queue.hpp"

#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>

#include "clock.hpp"
#include "error_text.hpp"

namespace kvxfer {
namespace {

std::size_t message_bytes(const Completion& completion) {
  if (completion.kind != Completion::Kind::message) return 0;
  return sizeof(Completion) + completion.data.size();
}

}  // namespace

Result<std::unique_ptr<CompletionQueue>> CompletionQueue::create(bool signals) {
  UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event) {
    return Error{Errc::out_of_memory, std::string("cannot create the completion eventfd: ") +
                                          errno_text() + "; raise the open files limit"};
  }
  return std::unique_ptr<CompletionQueue>(new CompletionQueue(std::move(event), signals));
}

void CompletionQueue::push(Completion completion) {
  if (completion.timestamp_ns == 0) completion.timestamp_ns = now_ns();
  bool was_empty = false;
  {
    const std::lock_guard lock(mutex_);
    was_empty = waiting_.empty();
    waiting_bytes_ += message_bytes(completion);
    waiting_.push_back(std::move(completion));
  }
  if (was_empty && signals_) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(event_.get(), &one, sizeof one);
  }
}

std::vector<Completion> CompletionQueue::drain() {
  if (signals_) {  // before taking: a completion pushed after the take sets the event again
    std::uint64_t count = 0;
    [[maybe_unused]] const auto read = ::read(event_.get(), &count, sizeof count);
  }
  const std::lock_guard lock(mutex_);
  waiting_bytes_ = 0;
  return std::exchange(waiting_, {});
}

void CompletionQueue::take_back(Completion::Kind kind, std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  std::erase_if(waiting_, [&](const Completion& waiting) {
    if (waiting.kind != kind || waiting.id != id) return false;
    waiting_bytes_ -= message_bytes(waiting);
    return true;
  });
}

std::size_t CompletionQueue::waiting_bytes() const {
  const std::lock_guard lock(mutex_);
  return waiting_bytes_;
}

}  // namespace kvxfer
