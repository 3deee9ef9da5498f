#include "group/stream_waits.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace kvxfer {

void StreamWaits::add(Waiting waiting) {
  next_deadline_ns_ = std::min(next_deadline_ns_, waiting.deadline_ns);
  waiting_.push_back(std::move(waiting));
  seen_changes_ = UINT64_MAX;  // it may be there already
}

std::size_t StreamWaits::poll(std::uint64_t now) {
  if (waiting_.empty()) return 0;
  const std::uint64_t changes = counters_.changes();
  if (std::exchange(seen_changes_, changes) == changes && now < next_deadline_ns_) return 0;
  const std::size_t count =
      std::erase_if(waiting_, [&](const Waiting& waiting) { return ended(waiting, now); });
  next_deadline_ns_ = UINT64_MAX;
  for (const Waiting& waiting : waiting_) {
    next_deadline_ns_ = std::min(next_deadline_ns_, waiting.deadline_ns);
  }
  return count;
}

bool StreamWaits::ended(const Waiting& waiting, std::uint64_t now) const {
  const auto failed = [&](Errc code, const std::string& why) {
    waiting.wait->end(Error{code, "a stream waited for counter " + std::to_string(waiting.imm) +
                                      " to reach " + std::to_string(waiting.total) + ", but " +
                                      why});
    return true;
  };
  const std::optional<std::uint64_t> count = counters_.count(waiting.imm);
  if (!count) return failed(Errc::stale_counter, "it was released");
  if (waiting.expect == Expect::exactly && *count > waiting.total) {
    return failed(Errc::protocol_error, "it stands at " + std::to_string(*count));
  }
  if (*count >= waiting.total) {
    waiting.wait->end({});
    return true;
  }
  if (now < waiting.deadline_ns) return false;
  return failed(Errc::deadline_exceeded,
                "it stands at " + std::to_string(*count) + " at the deadline");
}

void StreamWaits::end_all(const Error& why) {
  for (const Waiting& waiting : std::exchange(waiting_, {})) waiting.wait->end(why);
  next_deadline_ns_ = UINT64_MAX;
}

}  // namespace kvxfer
