#include "group/peers.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

namespace kvxfer {

std::shared_ptr<PeerHandle> Peers::handle(PeerId id) const {
  const std::lock_guard lock(handles_mutex_);
  const auto found = handles_.find(id);
  return found == handles_.end() ? nullptr : found->second;
}

std::size_t Peers::count_up() const {
  return static_cast<std::size_t>(std::count_if(
      all_.begin(), all_.end(), [](const auto& entry) { return entry.second->up(); }));
}

Peer* Peers::find(PeerId id) const {
  thread_.check("Peers");
  const auto found = all_.find(id);
  return found == all_.end() ? nullptr : found->second.get();
}

Peer* Peers::find(const SessionId& session) const {
  thread_.check("Peers");
  const auto found = std::find_if(all_.begin(), all_.end(), [&](const auto& entry) {
    return entry.second->session().id == session;
  });
  return found == all_.end() ? nullptr : found->second.get();
}

Peers::Closing* Peers::find_closing(PeerId id) {
  thread_.check("Peers");
  const auto found = closing_.find(id);
  return found == closing_.end() ? nullptr : &found->second;
}

Peer& Peers::add(std::unique_ptr<Stream> stream, const Session& session, PeerEvents& events,
                 OperationBook& operations) {
  thread_.check("Peers");
  const PeerId id = ++last_;
  return *all_.emplace(id,
                       std::make_unique<Peer>(id, std::move(stream), session, events, operations))
              .first->second;
}

void Peers::publish(const Peer& peer) {
  thread_.check("Peers");
  const std::lock_guard lock(handles_mutex_);
  handles_.emplace(peer.id(), peer.handle());
}

void Peers::withdraw(PeerId id) {
  const std::lock_guard lock(handles_mutex_);
  handles_.erase(id);
}

Peer& Peers::begin_closing(PeerId id, const Error& why) {
  thread_.check("Peers");
  const auto found = all_.find(id);
  assert(found != all_.end());
  Peer& peer = *found->second;
  closing_[id] = {.peer = std::move(found->second),
                  .why = {why.code, "peer " + peer.label() + ": " + why.text}};
  all_.erase(found);
  return peer;
}

Peers::Closing Peers::finish_closing(PeerId id) {
  thread_.check("Peers");
  const auto found = closing_.find(id);
  assert(found != closing_.end());
  Closing closed = std::move(found->second);
  closing_.erase(found);
  return closed;
}

}  // namespace kvxfer
