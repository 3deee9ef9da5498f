#include "group/stream_waits.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace kvxfer {

void StreamWaits::add(Waiting waiting) {
  thread_.check("StreamWaits");
  next_deadline_ns_ = std::min(next_deadline_ns_, waiting.deadline_ns);
  waiting_.push_back(std::move(waiting));
  seen_changes_ = UINT64_MAX;  // the total may be reached already
}

void StreamWaits::mirror(Imm imm, const std::shared_ptr<cuda::MirroredCount>& mirror) {
  thread_.check("StreamWaits");
  mirrors_.emplace_back(imm, mirror);
  update_mirrors();
}

std::size_t StreamWaits::poll(std::uint64_t now) {
  thread_.check("StreamWaits");
  if (waiting_.empty() && mirrors_.empty()) return 0;
  const std::uint64_t changes = counters_.changes();
  const bool changed = std::exchange(seen_changes_, changes) != changes;
  if (!changed && now < next_deadline_ns_) return 0;
  if (changed) update_mirrors();
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

void StreamWaits::update_mirrors() {
  std::erase_if(mirrors_, [this](const auto& each) {
    const auto mirror = each.second.lock();
    if (!mirror) return true;
    const std::optional<std::uint64_t> count = counters_.count(each.first);
    if (count) {
      mirror->set(*count);
    } else {
      mirror->end(Errc::stale_counter);
    }
    return !count;
  });
}

void StreamWaits::end_all(const Error& why) {
  thread_.check("StreamWaits");
  for (const auto& [imm, weak] : std::exchange(mirrors_, {})) {
    if (const auto mirror = weak.lock()) mirror->end(why.code);
  }
  for (const Waiting& waiting : std::exchange(waiting_, {})) waiting.wait->end(why);
  next_deadline_ns_ = UINT64_MAX;
}

}  // namespace kvxfer
