// What happens to submitted writes.
#include <algorithm>

#include "clock.hpp"
#include "domain_group.hpp"

namespace kvxfer {

void DomainGroup::submit(const SubmissionPtr& submission) {
  if (driven_) {
    run_commands();  // that came before
    return begin(submission);
  }
  if (post([this, submission] { begin(submission); })) return;
  for (Operation& part : submission->parts) {
    part.fail(Errc::engine_closed, "this engine was closed");
  }
  complete(*submission);
}

void DomainGroup::begin(const SubmissionPtr& submission) {
  submission->under_way = submission->parts.size();
  if (submission->parts.empty()) return complete(*submission);
  submissions_.emplace(submission->id, submission);
  for (Operation& part : submission->parts) {
    const OperationPtr operation(submission, part);
    // What is for a peer that was lost meanwhile has nothing to wait for.
    if (part.held() && part.handle->up) {
      held_.push_back(operation);
    } else {
      post_operation(operation);
    }
  }
}

void DomainGroup::release_held() {
  std::vector<OperationPtr> ready;
  std::erase_if(held_, [&](const OperationPtr& operation) {
    if (operation->code != Errc::ok) return true;
    if (operation->held()) return false;
    ready.push_back(operation);
    return true;
  });
  activity_ += ready.size();
  for (const OperationPtr& operation : ready) post_operation(operation);
}

void DomainGroup::wake() {
  if (sleeping_.load(std::memory_order_seq_cst)) poller_.wake();
}

void DomainGroup::post_operation(const OperationPtr& operation) {
  Peer* const peer = operation->handle->up;
  if (!peer) {
    return fail(operation, Errc::peer_lost,
                "peer " + operation->handle->label + " was lost before the operation was posted");
  }
  // Here, where deregister() is in order with it: the memory may be gone.
  if (operation->source && !operation->source->in_use_by(address_.engine)) {
    return fail(operation, Errc::unknown_region,
                "the source region is not registered at this engine any more");
  }
  if (const auto good = peer->reaches(*operation); !good) {
    return fail(operation, good.error().code, good.error().text);
  }
  peer->submit(operation);
}

void DomainGroup::send(PeerId peer, std::string data) {
  post([this, peer, data = std::move(data)] {
    const auto found = peers_.find(peer);
    if (found != peers_.end()) found->second->send_message(data);
  });
}

void DomainGroup::cancel(OperationId id) {
  post([this, id] {
    const auto found = submissions_.find(id);
    if (found == submissions_.end()) return;
    const SubmissionPtr submission = found->second;
    for (Operation& part : submission->parts) {
      if (!part.ended) fail({submission, part}, Errc::cancelled, "cancelled by the caller");
    }
  });
}

void DomainGroup::fail(const OperationPtr& operation, Errc code, std::string text) {
  operation->fail(code, std::move(text));
  if (operation->done()) return end_operation(operation);
  operation->finished_at_grace = operation->finished;
  // What is posted gets a little time, then the peer is given up: expire_operations().
  operation->deadline_ns = std::min(
      operation->deadline_ns, now_ns() + static_cast<std::uint64_t>(options_.peer_timeout.count()));
}

void DomainGroup::on_finished(const OperationPtr& operation, const WriteRange& writes,
                              const Error& error) {
  operation->finish(writes, error.code == Errc::ok);
  if (error.code != Errc::ok) operation->fail(error.code, error.text);
  settle(operation);
}

void DomainGroup::settle(const OperationPtr& operation) {
  if (operation->done()) end_operation(operation);
}

std::vector<OperationPtr> DomainGroup::operations_with(const Peer& peer, Imm imm) {
  return operations_that([&](const Operation& operation) {
    return operation.peer == peer.id() && operation.imm == imm;
  });
}

void DomainGroup::end_operation(const OperationPtr& operation) {
  if (std::exchange(operation->ended, true)) return;
  operation->handle->queued_writes -= operation->writes.size();
  // It may stay in its peer's queue for a while; what it holds should not.
  operation->writes = {};
  operation->source.reset();
  const auto found = submissions_.find(operation->submission->id);
  if (--found->second->under_way > 0) return;
  spare_writes_.keep(std::move(found->second->writes));
  complete(*found->second);
  submissions_.erase(found);
}

void DomainGroup::complete(const Submission& submission) {
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
  completions_->push(std::move(completion));
}

// Once no write reads the region, and no path's window of it is open.
void DomainGroup::end_deregistrations() {
  const auto writable = [](const Peer& peer, const MemoryRegion& region) {
    return peer.nics() && peer.nics()->has_windows_of(region);
  };
  std::erase_if(deregistering_, [&](auto& waiting) {
    const RegionPtr& region = waiting.first;
    const auto reads = [&](const Operation& part) { return !part.ended && part.source == region; };
    const bool used =
        std::any_of(submissions_.begin(), submissions_.end(),
                    [&](const auto& entry) {
                      const auto& parts = entry.second->parts;
                      return std::any_of(parts.begin(), parts.end(), reads);
                    }) ||
        std::any_of(peers_.begin(), peers_.end(),
                    [&](const auto& entry) { return writable(*entry.second, *region); }) ||
        std::any_of(closing_.begin(), closing_.end(),
                    [&](const auto& entry) { return writable(*entry.second.peer, *region); });
    if (!used) waiting.second->set_value();
    return !used;
  });
}

void DomainGroup::expire_operations(std::uint64_t now) {
  const auto late =
      operations_that([now](const Operation& part) { return now > part.deadline_ns; });
  for (const OperationPtr& operation : late) {
    if (operation->code == Errc::ok) {
      operation->deadline_ns = now + static_cast<std::uint64_t>(options_.peer_timeout.count());
      fail(operation, Errc::deadline_exceeded,
           "not delivered before its deadline: " + std::to_string(operation->finished) + " of " +
               std::to_string(operation->writes.size()) + " writes were");
      continue;
    }
    const auto peer = peers_.find(operation->peer);
    if (peer == peers_.end()) continue;
    if (operation->finished != operation->finished_at_grace || peer->second->late(now)) {
      operation->finished_at_grace = operation->finished;  // slow, but it moves; or starved
      operation->deadline_ns = now + static_cast<std::uint64_t>(options_.peer_timeout.count());
    } else {
      peer->second->lose({Errc::deadline_exceeded,
                          "it does not take the writes that were posted, though it is alive"});
    }
  }
}

Result<void> DomainGroup::deregister(const RegionPtr& region) {
  auto unused = std::make_shared<std::promise<void>>();
  const bool posted = post([this, region, unused] {
    regions_.erase(region->key());
    region->end_use();
    close_grants_of(region);
    for (const auto& [id, peer] : peers_) {
      for (const auto& path : peer->paths()) path->revoke_region(region->key());
      if (peer->nics()) peer->nics()->forget_region(region->key());
    }
    if (local_) local_->forget_source(*region);
    const auto readers =
        operations_that([&](const Operation& part) { return part.source == region; });
    deregistering_.emplace_back(region, unused);
    for (const OperationPtr& operation : readers) {
      fail(operation, Errc::cancelled, "its source region was deregistered");
    }
    end_deregistrations();
  });
  posted ? await(unused->get_future()) : ended_.wait();
  return region->close_registrations();  // on the caller's thread: unpinning takes long
}

}  // namespace kvxfer
