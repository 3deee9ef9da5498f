// What happens to submitted writes.
#include <algorithm>

#include "clock.hpp"
#include "domain_group.hpp"

namespace kvxfer {

void DomainGroup::submit(const OperationPtr& operation) {
  const bool posted = post([this, operation] {
    operations_.emplace(operation->id, operation);
    const auto found = peers_.find(operation->peer);
    if (found == peers_.end() || !found->second->up()) {
      return fail_operation(operation, Errc::peer_lost,
                            "the peer was lost before the operation was posted");
    }
    // Here, where deregister() is in order with it: the memory may be gone.
    if (operation->source && regions_.find(operation->source->key()) != operation->source) {
      return fail_operation(operation, Errc::unknown_region,
                            "the source region is not registered at this engine any more");
    }
    Peer& peer = *found->second;
    if (!peer.reaches(operation->source.get())) {
      return fail_operation(operation, Errc::permission_denied,
                            "peer " + peer.label() +
                                " may not read this process's registered memory, and there is no "
                                "tcp path; use memory from alloc(), or enable tcp on both sides");
    }
    peer.queue(operation);
    peer.pump();
  });
  if (!posted) {
    completions_->push({.kind = Completion::Kind::write,
                        .id = operation->id,
                        .peer = operation->peer,
                        .code = Errc::engine_closed,
                        .text = "this engine was closed"});
  }
}

void DomainGroup::send(PeerId peer, std::string data) {
  post([this, peer, data = std::move(data)] {
    const auto found = peers_.find(peer);
    if (found != peers_.end()) found->second->send_message(data);
  });
}

void DomainGroup::cancel(OperationId id) {
  post([this, id] {
    const auto found = operations_.find(id);
    if (found == operations_.end()) return;
    fail_operation(OperationPtr(found->second), Errc::cancelled, "cancelled by the caller");
  });
}

void DomainGroup::fail_operation(const OperationPtr& operation, Errc code, std::string text) {
  operation->fail(code, std::move(text));
  if (operation->done()) return end_operation(operation);
  operation->finished_at_grace = operation->finished;
  // What is posted gets a little time, then the peer is given up: expire_operations().
  operation->deadline_ns = std::min(
      operation->deadline_ns, now_ns() + static_cast<std::uint64_t>(options_.peer_timeout.count()));
}

void DomainGroup::on_finished(const OperationPtr& operation, std::size_t writes,
                              const Error& error) {
  operation->finished += writes;
  if (error.code != Errc::ok) operation->fail(error.code, error.text);
  if (operation->done()) end_operation(operation);
}

void DomainGroup::end_operation(const OperationPtr& operation) {
  operations_.erase(operation->id);
  if (const auto peer = find_peer(operation->peer)) {
    peer->queued_writes -= operation->writes.size();
  }
  // It may stay in its peer's queue for a while; what it holds should not.
  operation->writes = {};
  operation->source.reset();
  completions_->push({.kind = Completion::Kind::write,
                      .id = operation->id,
                      .peer = operation->peer,
                      .code = operation->code,
                      .text = operation->text});
  std::erase_if(deregistering_, [&](auto& waiting) {
    const bool used = std::any_of(operations_.begin(), operations_.end(), [&](const auto& entry) {
      return entry.second->source == waiting.first;
    });
    if (!used) waiting.second->set_value();
    return !used;
  });
}

void DomainGroup::expire_operations(std::uint64_t now) {
  std::vector<OperationPtr> late;
  for (const auto& [id, operation] : operations_) {
    if (now > operation->deadline_ns) late.push_back(operation);
  }
  for (const OperationPtr& operation : late) {
    if (operation->code == Errc::ok) {
      operation->deadline_ns = now + static_cast<std::uint64_t>(options_.peer_timeout.count());
      fail_operation(operation, Errc::deadline_exceeded,
                     "not delivered before its deadline: " + std::to_string(operation->finished) +
                         " of " + std::to_string(operation->writes.size()) + " writes were");
    } else if (operation->finished != operation->finished_at_grace) {
      operation->finished_at_grace = operation->finished;  // slow, but it moves
      operation->deadline_ns = now + static_cast<std::uint64_t>(options_.peer_timeout.count());
    } else if (const auto peer = peers_.find(operation->peer); peer != peers_.end()) {
      peer->second->lose({Errc::deadline_exceeded,
                          "it does not take the writes that were posted, though it is alive"});
    }
  }
}

void DomainGroup::release_counter(Imm imm) {
  run_on_engine_thread([this, imm] {
    counters_.release(imm);
    for (const auto& [id, peer] : peers_) {
      for (const auto& path : peer->paths()) path->revoke_counter(imm);
    }
  });
}

void DomainGroup::deregister(const RegionPtr& region) {
  auto unused = std::make_shared<std::promise<void>>();
  const bool posted = post([this, region, unused] {
    regions_.erase(region->key());
    for (const auto& [id, peer] : peers_) {
      for (const auto& path : peer->paths()) path->revoke_region(region->key());
    }
    if (local_) local_->forget_source(*region);
    std::vector<OperationPtr> readers;
    for (const auto& [id, operation] : operations_) {
      if (operation->source == region) readers.push_back(operation);
    }
    if (readers.empty()) return unused->set_value();
    deregistering_.emplace_back(region, unused);
    for (const OperationPtr& operation : readers) {
      fail_operation(operation, Errc::cancelled, "its source region was deregistered");
    }
  });
  posted ? unused->get_future().wait() : ended_.wait();
}

}  // namespace kvxfer
