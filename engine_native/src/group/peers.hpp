// The peers of an engine: connected or connecting ones, and lost ones whose writes may still land.
// Engine thread only, unless said otherwise.
#pragma once

#include <cassert>
#include <future>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "group/peer.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class Peers {
 public:
  // A lost peer, until none of its writes lands any more.
  struct Closing {
    std::unique_ptr<Peer> peer;
    Error why;
    std::vector<std::shared_ptr<std::promise<void>>> waiting;
  };

  Peers() = default;
  ~Peers() { assert(all_.empty() && closing_.empty()); }
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // Any thread. Returns null unless the peer has been up and is not closed yet.
  std::shared_ptr<PeerHandle> handle(PeerId id) const;

  std::size_t count_up() const;
  const std::unordered_map<PeerId, std::unique_ptr<Peer>>& all() const { return all_; }
  // Returns null if there is none.
  Peer* find(PeerId id) const;
  Peer* find(const SessionId& session) const;
  const std::unordered_map<PeerId, Closing>& closing() const { return closing_; }
  Closing* find_closing(PeerId id);

  Peer& add(std::unique_ptr<Stream> stream, const Session& session, PeerEvents& events,
            OperationBook& operations);
  // Lets handle() find the peer, until withdraw().
  void publish(const Peer& peer);
  void withdraw(PeerId id);
  // Move a peer to closing() and out of it. The peer must be there.
  Peer& begin_closing(PeerId id, const Error& why);
  Closing finish_closing(PeerId id);

 private:
  [[no_unique_address]] ThreadOwner thread_;
  std::unordered_map<PeerId, std::unique_ptr<Peer>> all_;
  std::unordered_map<PeerId, Closing> closing_;
  PeerId last_ = 0;

  mutable std::mutex handles_mutex_;
  std::unordered_map<PeerId, std::shared_ptr<PeerHandle>> handles_;
};

}  // namespace kvxfer
