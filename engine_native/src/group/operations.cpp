#include "group/operations.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

#include "clock.hpp"
#include "group/peer.hpp"

namespace kvxfer {

template <typename Fits>
std::vector<OperationPtr> Operations::those_that(Fits fits) const {
  std::vector<OperationPtr> found;
  for (const auto& [id, submission] : submissions_) {
    for (Operation& part : submission->parts) {
      if (!part.ended && fits(part)) found.emplace_back(submission, part);
    }
  }
  return found;
}

// --- beginning -------------------------------------------------------------------------------

void Operations::refuse(Submission& submission, const Error& why) {
  for (Operation& part : submission.parts) part.fail(why.code, why.text);
  complete(submission);
}

void Operations::begin(const SubmissionPtr& submission) {
  thread_.check("Operations");
  submission->under_way = submission->parts.size();
  if (submission->parts.empty()) return complete(*submission);
  submissions_.emplace(submission->id, submission);
  for (Operation& part : submission->parts) {
    const OperationPtr operation(submission, part);
    // Operations for a peer that was lost meanwhile have nothing to wait for.
    if (part.held() && part.handle->up) {
      held_.push_back(operation);
    } else {
      post(operation);
    }
  }
}

bool Operations::may_release() const {
  return std::any_of(held_.begin(), held_.end(),
                     [](const OperationPtr& operation) { return !operation->held(); });
}

std::size_t Operations::release_held() {
  thread_.check("Operations");
  if (held_.empty()) return 0;
  std::vector<OperationPtr> ready;
  std::erase_if(held_, [&](const OperationPtr& operation) {
    if (operation->code != Errc::ok) return true;
    if (operation->held()) return false;
    ready.push_back(operation);
    return true;
  });
  for (const OperationPtr& operation : ready) post(operation);
  return ready.size();
}

void Operations::post(const OperationPtr& operation) {
  Peer* const peer = operation->handle->up;
  if (!peer) {
    return fail(operation, Errc::peer_lost,
                "peer " + operation->handle->label + " was lost before the operation was posted");
  }
  // Checked here, in order with deregister(): the memory may be gone.
  if (operation->source && !operation->source->in_use_by(engine_)) {
    return fail(operation, Errc::unknown_region,
                "the source region is not registered at this engine any more");
  }
  if (const auto good = peer->reaches(*operation); !good) {
    return fail(operation, good.error().code, good.error().text);
  }
  peer->submit(operation);
}

// --- under way -------------------------------------------------------------------------------

void Operations::on_finished(const OperationPtr& operation, const WriteRange& writes,
                             const Error& error) {
  thread_.check("Operations");
  operation->finish(writes, error.code == Errc::ok);
  if (error.code != Errc::ok) operation->fail(error.code, error.text);
  settle(operation);
}

void Operations::fail(const OperationPtr& operation, Errc code, std::string text) {
  thread_.check("Operations");
  operation->fail(code, std::move(text));
  if (operation->done()) return end(operation);
  operation->finished_at_grace = operation->finished;
  // Posted writes get a little time, then the peer is given up: expire().
  operation->deadline_ns = std::min(operation->deadline_ns, now_ns() + grace_ns_);
}

void Operations::settle(const OperationPtr& operation) {
  thread_.check("Operations");
  if (operation->done()) end(operation);
}

std::vector<OperationPtr> Operations::with(PeerId peer, Imm imm) const {
  return those_that(
      [&](const Operation& operation) { return operation.peer == peer && operation.imm == imm; });
}

void Operations::cancel(OperationId id) {
  thread_.check("Operations");
  const auto found = submissions_.find(id);
  if (found == submissions_.end()) return;
  const SubmissionPtr submission = found->second;
  for (Operation& part : submission->parts) {
    if (!part.ended) fail({submission, part}, Errc::cancelled, "cancelled by the caller");
  }
}

void Operations::fail_reading(const RegionPtr& region) {
  const auto readers =
      those_that([&](const Operation& operation) { return operation.source == region; });
  for (const OperationPtr& operation : readers) {
    fail(operation, Errc::cancelled, "its source region was deregistered");
  }
}

bool Operations::reads(const MemoryRegion& region) const {
  const auto in_part = [&](const Operation& part) {
    return !part.ended && part.source.get() == &region;
  };
  return std::any_of(submissions_.begin(), submissions_.end(), [&](const auto& entry) {
    const auto& parts = entry.second->parts;
    return std::any_of(parts.begin(), parts.end(), in_part);
  });
}

void Operations::end_all_of(PeerId peer, const Error& why) {
  const auto orphans =
      those_that([peer](const Operation& operation) { return operation.peer == peer; });
  for (const OperationPtr& operation : orphans) {
    operation->fail(why.code, why.text);
    end(operation);
  }
}

void Operations::expire(std::uint64_t now) {
  thread_.check("Operations");
  const auto late = those_that([now](const Operation& part) { return now > part.deadline_ns; });
  for (const OperationPtr& operation : late) {
    if (operation->code == Errc::ok) {
      operation->deadline_ns = now + grace_ns_;
      fail(operation, Errc::deadline_exceeded,
           "not delivered before its deadline: " + std::to_string(operation->finished) + " of " +
               std::to_string(operation->writes.size()) + " writes were");
      continue;
    }
    Peer* const peer = operation->handle->up;
    if (!peer) continue;
    if (operation->finished != operation->finished_at_grace || peer->late(now)) {
      operation->finished_at_grace = operation->finished;  // slow but moving, or starved
      operation->deadline_ns = now + grace_ns_;
    } else {
      peer->lose({Errc::deadline_exceeded,
                  "it does not take the writes that were posted, though it is alive"});
    }
  }
}

// --- ending ----------------------------------------------------------------------------------

void Operations::end(const OperationPtr& operation) {
  if (std::exchange(operation->ended, true)) return;
  [[maybe_unused]] const std::uint64_t queued =
      operation->handle->queued_writes.fetch_sub(operation->writes.size());
  assert(queued >= operation->writes.size());
  // It may stay in its peer's queue for a while, but must not hold memory there.
  operation->writes = {};
  operation->source.reset();
  const auto found = submissions_.find(operation->submission->id);
  assert(found != submissions_.end() && found->second->under_way > 0);
  if (--found->second->under_way > 0) return;
  spare_writes_.keep(std::move(found->second->writes));
  complete(*found->second);
  submissions_.erase(found);
}

void Operations::complete(const Submission& submission) {
  Completion completion{.kind = Completion::Kind::write, .id = submission.id};
  if (!submission.parts.empty()) completion.peer = submission.parts.front().peer;
  for (std::size_t i = 0; i < submission.parts.size(); ++i) {
    const Operation& part = submission.parts[i];
    if (part.code == Errc::ok) continue;
    if (completion.code == Errc::ok) {
      completion.peer = part.peer;
      completion.code = part.code;
      completion.text = part.text;
    }
    completion.failed.push_back(
        {.part = i, .peer = part.peer, .code = part.code, .text = part.text});
  }
  completions_.push(std::move(completion));
}

}  // namespace kvxfer
