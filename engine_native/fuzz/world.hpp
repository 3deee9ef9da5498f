// What surrounds a path of an engine, and memory that shows what was written where.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "completion_queue.hpp"
#include "domain.hpp"
#include "imm_counter.hpp"
#include "input.hpp"
#include "memory_region.hpp"
#include "poller.hpp"

namespace kvxfer::fuzz {

inline constexpr PeerId kPeer = 1;
inline constexpr PeerId kStranger = 2;

// Memory of the engine under test. The peer may write to `open`, and with `granted_imm` to
// `granted` until release(); never to anything else, nor with the counter of another peer.
class World {
 public:
  World();
  ~World();

  ReceiveContext receive_context() { return {regions, *counters, stats, activity}; }
  // One of the keys that a peer might name, or any.
  std::uint64_t key(Input& input) const;
  Imm imm(Input& input) const;
  // A write of ours to a region of the peer, out of `source`, which may be null.
  OperationPtr operation(Input& input, RegionPtr source, std::uint64_t key) const;
  // Of `granted`: from here on nothing may change there. The paths have to be told.
  void release();
  bool released() const { return released_.has_value(); }
  // The same with `open`.
  void deregister();
  bool deregistered() const { return deregistered_.has_value(); }
  // Aborts where a byte has changed that nobody was allowed to write.
  void check() const;

  std::unique_ptr<CompletionQueue> completions;
  std::unique_ptr<ImmCounters> counters;
  RegionTable regions;
  EngineStats stats;
  std::uint64_t activity = 0;
  Poller poller;

  RegionPtr open;
  RegionPtr granted;
  RegionPtr of_stranger;
  Imm open_imm = 0;
  Imm granted_imm = 0;
  Imm stranger_imm = 0;

 private:
  static constexpr std::size_t kRegion = 4096;
  static constexpr std::size_t kGuard = 1024;
  static constexpr std::byte kUntouched{0xa5};
  using Bytes = std::vector<std::byte>;

  // guard, open, guard, granted, guard, of_stranger, guard
  std::byte* at(std::size_t region) {
    return memory_.data() + kGuard + region * (kRegion + kGuard);
  }
  static Bytes copy_of(const MemoryRegion& region) {
    return {region.host(), region.host() + region.size()};
  }

  Bytes memory_;
  RegionPtr pool_;
  std::optional<Bytes> released_;
  std::optional<Bytes> deregistered_;
};

// What a path reports: checks the books of the operations that are posted on it.
class Books final : public PathEvents {
 public:
  void on_finished(const OperationPtr& operation, const WriteRange& writes,
                   const Error& error) override;
  void on_lost(Path&, Error) override { lost = true; }

  bool lost = false;
};

}  // namespace kvxfer::fuzz
