// Memory that peers may write: what they are told of it, ranges granted with counters, and taking
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
  // Its neighbours.
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
  // The peer has asked for the key.
  void share(Peer& peer, std::uint64_t key);

  // --- grants
  // Any thread: ranges for the counter's writer, which count once they are tracked.
  Result<std::vector<RegionPtr>> make_grants(Imm imm, std::span<const RegionRange> ranges);
  // Also any thread: no peer was told of them.
  void drop_grants(std::span<const RegionPtr> grants);
  // In order with releasing the counter and with taking regions back.
  void track_grants(Imm imm, const std::vector<RegionPtr>& grants);

  // --- taking back
  // False if it is done. Otherwise peers are asked to stop, because no NIC could be told to refuse,
  // or a GPU is copying; then `done` is set, or without one Completion::Kind::released follows.
  bool release_counter(Imm imm, std::shared_ptr<std::promise<void>> done);
  void on_revoked(PeerId peer, Imm imm);
  // Nothing of the peer lands any more. What is registered for it alone is closed, some time later.
  void forget(PeerId peer);
  // Resets the paths of peers that were asked and have not answered in time.
  void reset_late_writers(std::uint64_t now);
  // When to call that next; UINT64_MAX where no peer is being asked.
  std::uint64_t next_deadline_ns() const;
  // The region, with its grants, is a destination no more.
  void take_back(const RegionPtr& region);
  // Whether a path has a window of it open still.
  bool has_windows_of(const MemoryRegion& region) const;

 private:
  // A released counter that these peers have been asked to write to no more.
  struct Revocation {
    Imm imm;
    std::vector<PeerId> asked;
    std::vector<RegionPtr> grants;  // made with its counter
    std::uint64_t deadline_ns;      // then their paths are reset
    bool reset = false;
    bool copying = false;                      // a GPU, some of what arrived before
    std::shared_ptr<std::promise<void>> done;  // null: a completion tells
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
  std::unordered_map<Imm, std::vector<RegionPtr>> grants_;  // of live counters
  std::vector<Revocation> revocations_;
};

}  // namespace kvxfer
