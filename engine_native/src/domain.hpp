// What a fabric implements. Everything above is fabric-free, everything fabric-specific is below,
// in fabric/<name>/. Engine thread only.
#pragma once

#include <cstdint>
#include <string_view>

#include "imm_counter.hpp"
#include "kvxfer/types.hpp"
#include "memory_region.hpp"
#include "operation.hpp"

namespace kvxfer {

class Path;

// What a fabric places arriving bytes with.
struct Reception {
  RegionTable& regions;
  ImmCounters& counters;
  EngineStats& stats;
  // Grows whenever a path moves something: while it does, the engine thread does not sleep.
  std::uint64_t& activity;
};

// How a path reports to the group that owns it. A path must not be destroyed from within a call.
class PathEvents {
 public:
  // `writes` of the operation, posted on this path, are delivered, or refused for `error`.
  virtual void on_finished(const OperationPtr& operation, std::size_t writes,
                           const Error& error) = 0;
  // The path is broken and will report nothing more.
  virtual void on_lost(Path& path, Error error) = 0;

 protected:
  ~PathEvents() = default;
};

// The way from one local domain to one domain of one peer (what a queue pair is to verbs).
//
// Destroying a path is the fence: afterwards nothing of the peer lands through it, and no source
// memory is read through it, so operations posted on it may be ended.
class Path {
 public:
  virtual ~Path() = default;

  virtual std::string_view fabric() const = 0;
  // Whether the peer can get at this source memory through this path (null: no bytes).
  virtual bool reaches(const MemoryRegion* source) const = 0;
  virtual bool has_room() const = 0;
  // Posts the operation's next writes as one batch and advances operation->posted. False if the
  // path turns out to have no room. Only when has_room() and operation->wants_post().
  virtual bool post(const OperationPtr& operation) = 0;

  // From now on nothing arriving with this immediate, or for this region, is placed.
  virtual void revoke_counter(Imm imm) = 0;
  virtual void revoke_region(std::uint64_t key) = 0;

  // When bytes of the peer last came this way; 0 where that does not prove that it runs.
  virtual std::uint64_t last_heard_ns() const { return 0; }
};

// One NIC endpoint, or what stands for one.
class Domain {
 public:
  virtual ~Domain() = default;

  virtual std::string_view fabric() const = 0;
  // Moves what can be moved without waiting. Domains whose paths are driven by the poller alone
  // have nothing to do here.
  virtual void poll() = 0;
  // Called before the engine thread sleeps: arranges to be woken. False if there is work after all.
  virtual bool prepare_sleep() = 0;
  virtual void finish_sleep() = 0;
  // The region is no source any more; forget what peers were told of it.
  virtual void forget_source(const MemoryRegion& region) = 0;
};

}  // namespace kvxfer
