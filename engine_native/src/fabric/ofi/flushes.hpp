// Waits until nothing that a peer has begun to write is still being placed, for providers whose
// software on the receiving side places the bytes: closing a key refuses the writes that begin
// later, but not one that is half received.
//
// If the provider has one ordered connection for both directions (tcp), a write of ours is
// acknowledged after whatever the peer was sending, so its completion is the proof. Otherwise, and
// if the peer does not answer, the endpoint is closed.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "fabric/ofi/endpoint.hpp"
#include "kvxfer/types.hpp"
#include "thread_owner.hpp"

namespace kvxfer::ofi {

class Flushes {
 public:
  // The flushes of one path, which posts a write whenever more are wanted than are done and none is
  // under way.
  struct Entry {
    Entry(PeerId of, Endpoint* on) : peer(of), endpoint(on) {}
    PeerId peer;
    Endpoint* endpoint;
    std::atomic<std::uint64_t> wanted = 0;
    std::uint64_t done = 0;  // guarded by mutex_
    bool closed = false;     // guarded by mutex_
  };
  using EntryPtr = std::shared_ptr<Entry>;

  // `ordered`: the provider has such an ordered connection.
  Flushes(bool ordered, Duration timeout, const Poller& poller)
      : ordered_(ordered), timeout_(timeout), poller_(poller) {}

  // --- engine thread
  // Adds an endpoint through which the peer may write from now on.
  EntryPtr add(PeerId peer, Endpoint& endpoint);
  void finish(Entry& entry, std::uint64_t wanted);
  // Removes an entry whose endpoint is closed, or is about to be closed by the caller.
  void remove(Entry& entry);

  // --- any other thread
  // Waits until nothing that these peers had begun to write before is placed any more.
  void wait_for(const std::vector<PeerId>& peers);

 private:
  [[no_unique_address]] ThreadOwner thread_;
  bool ordered_;
  Duration timeout_;
  const Poller& poller_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<EntryPtr> entries_;
};

}  // namespace kvxfer::ofi
