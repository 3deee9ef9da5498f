// What a fabric implements. Everything above is fabric-free, everything fabric-specific is below,
// in fabric/<name>/. Engine thread only, unless said otherwise.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "imm_counter.hpp"
#include "kvxfer/types.hpp"
#include "memory_region.hpp"
#include "operation.hpp"

namespace kvxfer {

class Path;
namespace cuda {
class Gpus;
}

// What a fabric places arriving bytes with.
struct ReceiveContext {
  RegionTable& regions;
  ImmCounters& counters;
  EngineStats& stats;
  // Grows whenever a path moves something: while it does, the engine thread does not sleep.
  std::uint64_t& activity;
  cuda::Gpus& gpus;
};

// Whom a path leads to.
struct PathPeer {
  PeerId id = 0;
  std::string label;    // for error texts
  bool groups = false;  // it knows WireWrite::grouped
  bool stops = false;   // it says what it knows before its ends of paths close
};

// How a path reports to the group that owns it. A path must not be destroyed from within a call.
class PathEvents {
 public:
  // These writes of the operation, posted on this path, are delivered, or refused for `error`.
  virtual void on_finished(const OperationPtr& operation, const WriteRange& writes,
                           const Error& error) = 0;
  // The path is broken and will report nothing more.
  virtual void on_lost(Path& path, Error error) = 0;

 protected:
  ~PathEvents() = default;
};

// Which path a write takes: of those that reach, the first kind here.
enum class PathRank : std::uint8_t { local, nic, tcp };

// The way from one local domain to one domain of one peer (what a queue pair is to verbs).
//
// Destroying a path is the fence: afterwards nothing of the peer lands through it, and no source
// memory is read through it, so operations posted on it may be ended.
class Path {
 public:
  virtual ~Path() = default;

  virtual std::string_view fabric() const = 0;
  virtual PathRank rank() const = 0;
  // Whether this path can carry the operation at all: its source, its destination, its NIC.
  virtual bool reaches(const Operation& operation) const = 0;
  // For writes of this operation. `counted`: they carry an immediate.
  virtual bool has_room(const Operation& operation, bool counted) const = 0;
  // Posts the first of these writes as one batch. Returns how many; 0 if the path turns out to
  // have no room. Only with has_room().
  virtual std::size_t post(const OperationPtr& operation, const WriteRange& writes) = 0;
  // Of paths of one rank the one with the least takes the next batch: nanoseconds that what is
  // posted on its NIC needs on the line.
  virtual std::uint64_t load_ns() const { return 0; }
  // Its share among paths of one rank.
  virtual std::uint64_t bits_per_second() const { return 1; }

  // From now on nothing arriving with this immediate, or for this region, is placed. Paths whose
  // NIC places the bytes cannot promise that; there the group asks the peer (nic_link.hpp).
  virtual void revoke_counter(Imm imm) = 0;
  virtual void revoke_region(std::uint64_t key) = 0;

  // At every heartbeat: a path that is cut off while heartbeats come is lost after `timeout_ns`.
  // For `stalled_ns` of the time since the last one this engine stood still.
  virtual void tick(std::uint64_t, std::uint64_t, std::uint64_t) {}
  // When bytes of the peer last came this way; 0 where that does not prove that it runs.
  virtual std::uint64_t last_heard_ns() const { return 0; }
  // The peer's process as seen from here; 0 where it is not visible.
  virtual pid_t pid() const { return 0; }
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
