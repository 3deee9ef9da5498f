// The interface that a fabric implements. Code above it knows no fabric; the code of a fabric is
// below, in fabric/<name>/. Engine thread only, unless said otherwise.
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

// The state with which a fabric places arriving bytes.
struct ReceiveContext {
  RegionTable& regions;
  ImmCounters& counters;
  EngineStats& stats;
  // Grows whenever a path moves something; while it grows, the engine thread does not sleep.
  std::uint64_t& activity;
  cuda::Gpus& gpus;
};

// The peer at the other end of a path.
struct PathPeer {
  PeerId id = 0;
  std::string label;    // used in error texts
  bool groups = false;  // the peer knows WireWrite::grouped
  bool stops = false;   // the peer sends path_stop before it closes a path
};

// Events that a path reports to its group. A path must not be destroyed from within a call.
class PathEvents {
 public:
  // Called when these posted writes are delivered, or were refused with `error`.
  virtual void on_finished(const OperationPtr& operation, const WriteRange& writes,
                           const Error& error) = 0;
  // Called when the path is broken; it reports nothing more.
  virtual void on_lost(Path& path, Error error) = 0;

 protected:
  ~PathEvents() = default;
};

// The kinds of paths in order of preference: a write takes a path of the first kind that reaches.
enum class PathRank : std::uint8_t { local, nic, tcp };

// A connection from one local domain to one domain of one peer (what a queue pair is to verbs).
//
// Destroying a path is the fence: afterwards nothing of the peer lands through it, and no source
// memory is read through it, so operations posted on it may be ended.
class Path {
 public:
  virtual ~Path() = default;

  virtual std::string_view fabric() const = 0;
  virtual PathRank rank() const = 0;
  // True if this path can carry the operation at all, given its source, destination and NIC.
  virtual bool reaches(const Operation& operation) const = 0;
  // True if there is room for writes of this operation. `counted`: they carry an immediate.
  virtual bool has_room(const Operation& operation, bool counted) const = 0;
  // Posts the first of these writes as one batch. Returns how many; 0 if the path turns out to
  // have no room. Requires has_room().
  virtual std::size_t post(const OperationPtr& operation, const WriteRange& writes) = 0;
  // The nanoseconds that the writes posted on its NIC need on the line. Among paths of one rank,
  // the one with the least takes the next batch.
  virtual std::uint64_t load_ns() const { return 0; }
  // The speed, which decides its share among paths of one rank.
  virtual std::uint64_t bits_per_second() const { return 1; }

  // From now on, place nothing that arrives with this immediate or for this region. Paths whose NIC
  // places the bytes cannot promise that; there the group asks the peer (nic_link.hpp).
  virtual void revoke_counter(Imm imm) = 0;
  virtual void revoke_region(std::uint64_t key) = 0;

  // Called at every heartbeat with (now, stalled_ns, timeout_ns). A path that is cut off while
  // heartbeats arrive is lost after `timeout_ns`; `stalled_ns` is the time since the last call in
  // which this engine did not run.
  virtual void tick(std::uint64_t, std::uint64_t, std::uint64_t) {}
  // The time at which bytes of the peer last arrived; 0 if that does not prove that it runs.
  virtual std::uint64_t last_heard_ns() const { return 0; }
  // The peer's process as seen from here; 0 if it is not visible.
  virtual pid_t pid() const { return 0; }
};

// A NIC that the engine has open, or what stands for one.
class Domain {
 public:
  virtual ~Domain() = default;

  virtual std::string_view fabric() const = 0;
  // Moves what can be moved without waiting. Does nothing if the poller alone drives the paths.
  virtual void poll() = 0;
  // Called before a sleep: arranges to be woken. Returns false if there is work after all.
  virtual bool prepare_sleep() = 0;
  virtual void finish_sleep() = 0;
  // Forgets what peers were told of the region, which is no longer a source.
  virtual void forget_source(const MemoryRegion& region) = 0;
};

}  // namespace kvxfer
