// Memory that peers may write: shares its keys, grants ranges of it with counters, and takes
// both back. Engine thread only, unless said otherwise.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "background.hpp"
#include "completion_queue.hpp"
#include "group/fabrics.hpp"
#include "group/peers.hpp"
#include "imm_counter.hpp"
#include "memory_region.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class ExposedMemory {
 public:
  // The objects that it works with.
  struct Context {
    const EngineId& engine;
    const Fabrics& fabrics;
    const Peers& peers;
    Background& background;
    cuda::Gpus& gpus;
    ImmCounters& counters;
    RegionTable& regions;
    CompletionQueue& completions;
    EngineStats& stats;
  };

  explicit ExposedMemory(const Context& context) : context_(context) {}

  // --- telling peers
  // Answers a peer that has asked for the key.
  void share(Peer& peer, std::uint64_t key);

  // --- grants
  // Any thread: makes grants for the counter's writer, to be passed to track_grants().
  Result<std::vector<RegionPtr>> make_grants(Imm imm, std::span<const RegionRange> ranges);
  // Any thread: removes grants that no peer knows.
  void drop_grants(std::span<const RegionPtr> grants);
  // Records the grants, in order with release_counter() and take_back().
  void track_grants(Imm imm, const std::vector<RegionPtr>& grants);

  // --- taking back
  // Returns false if it is done. Otherwise peers are asked to stop, because no NIC could be told to
  // refuse, or a GPU is copying; later `done` is set, or if null, Completion::Kind::released
  // follows.
  bool release_counter(Imm imm, std::shared_ptr<std::promise<void>> done);
  void on_revoked(PeerId peer, Imm imm);
  // Forgets a peer whose writes no longer land. Closes registrations for it alone, some time later.
  void forget(PeerId peer);
  // Resets the paths of peers that were asked and have not answered in time.
  void reset_late_writers(std::uint64_t now);
  // Returns when reset_late_writers() is next due; UINT64_MAX if no peer is being asked.
  std::uint64_t next_deadline_ns() const;
  // Ends the region, with its grants, as a destination.
  void take_back(const RegionPtr& region);
  // True if a path still has a window of it open.
  bool has_windows_of(const MemoryRegion& region) const;

 private:
  // A released counter; these peers have been asked to stop writing to it.
  struct Revocation {
    Imm imm;
    std::vector<PeerId> asked;
    std::vector<RegionPtr> grants;  // made with its counter
    std::uint64_t deadline_ns;      // then their paths are reset
    bool reset = false;
    bool copying = false;                      // a GPU copies bytes that arrived before
    std::shared_ptr<std::promise<void>> done;  // null: a completion reports it
  };

  void share(Peer& peer, const RegionPtr& region);
  void close_grants(const std::vector<RegionPtr>& grants);
  void close_grants_of(const RegionPtr& region);
  struct Revoked {
    std::vector<PeerId> asked;
    bool copying;
  };
  Revoked revoke(Imm imm);
  void end_revocations();

  [[no_unique_address]] ThreadOwner thread_;
  Context context_;
  std::unordered_map<Imm, std::vector<RegionPtr>> grants_;  // grants of live counters
  std::vector<Revocation> revocations_;
};

}  // namespace kvxfer
