// What happens to submitted writes.
#include <algorithm>

#include "clock.hpp"
#include "domain_group.hpp"

namespace kvxfer {

void DomainGroup::submit(const std::vector<OperationPtr>& operations) {
  const bool posted = post([this, operations] {
    for (const OperationPtr& operation : operations) begin_operation(operation);
  });
  if (posted) return;
  for (const OperationPtr& operation : operations) {
    completions_->push({.kind = Completion::Kind::write,
                        .id = operation->id,
                        .peer = operation->peer,
                        .code = Errc::engine_closed,
                        .text = "this engine was closed"});
  }
}

void DomainGroup::begin_operation(const OperationPtr& operation) {
  operations_.emplace(operation->id, operation);
  // What is for a peer that was lost meanwhile has nothing to wait for.
  if (operation->held() && find_up(operation->peer)) {
    held_.push_back(operation);
  } else {
    post_operation(operation);
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
  Peer* const peer = find_up(operation->peer);
  if (!peer) {
    return fail(operation, Errc::peer_lost,
                "peer " + operation->handle->label + " was lost before the operation was posted");
  }
  // Here, where deregister() is in order with it: the memory may be gone.
  if (operation->source && regions_.find(operation->source->key()) != operation->source) {
    return fail(operation, Errc::unknown_region,
                "the source region is not registered at this engine any more");
  }
  if (const auto good = peer->reaches(*operation); !good) {
    return fail(operation, good.error().code, good.error().text);
  }
  peer->submit(operation);
}

Peer* DomainGroup::find_up(PeerId peer) const {
  const auto found = peers_.find(peer);
  return found != peers_.end() && found->second->up() ? found->second.get() : nullptr;
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
    fail(OperationPtr(found->second), Errc::cancelled, "cancelled by the caller");
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
  std::vector<OperationPtr> found;
  for (const auto& [id, operation] : operations_) {
    if (operation->peer == peer.id() && operation->imm == imm) found.push_back(operation);
  }
  return found;
}

void DomainGroup::end_operation(const OperationPtr& operation) {
  if (operations_.erase(operation->id) == 0) return;
  operation->handle->queued_writes -= operation->writes.size();
  // It may stay in its peer's queue for a while; what it holds should not.
  spare_writes_.keep(std::exchange(operation->writes, {}));
  operation->source.reset();
  completions_->push({.kind = Completion::Kind::write,
                      .id = operation->id,
                      .peer = operation->peer,
                      .code = operation->code,
                      .text = operation->text});
}

// Once no write reads the region, and no path's window of it is open.
void DomainGroup::end_deregistrations() {
  const auto writable = [](const Peer& peer, const MemoryRegion& region) {
    return peer.nics() && peer.nics()->has_windows_of(region);
  };
  std::erase_if(deregistering_, [&](auto& waiting) {
    const RegionPtr& region = waiting.first;
    const bool used =
        std::any_of(operations_.begin(), operations_.end(),
                    [&](const auto& entry) { return entry.second->source == region; }) ||
        std::any_of(peers_.begin(), peers_.end(),
                    [&](const auto& entry) { return writable(*entry.second, *region); }) ||
        std::any_of(closing_.begin(), closing_.end(),
                    [&](const auto& entry) { return writable(*entry.second.peer, *region); });
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
    close_grants_of(region);
    for (const auto& [id, peer] : peers_) {
      for (const auto& path : peer->paths()) path->revoke_region(region->key());
      if (peer->nics()) peer->nics()->forget_region(region->key());
    }
    if (local_) local_->forget_source(*region);
    std::vector<OperationPtr> readers;
    for (const auto& [id, operation] : operations_) {
      if (operation->source == region) readers.push_back(operation);
    }
    deregistering_.emplace_back(region, unused);
    for (const OperationPtr& operation : readers) {
      fail(operation, Errc::cancelled, "its source region was deregistered");
    }
    end_deregistrations();
  });
  posted ? unused->get_future().wait() : ended_.wait();
  return region->close_registrations();  // on the caller's thread: unpinning takes long
}

}  // namespace kvxfer
