// The state that the calls of the double share: contexts, the current context of each thread, and
// errors.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "capture.hpp"
#include "memory.hpp"
#include "stream.hpp"

namespace kvxfer::cuda_double {

// The lock of a context. A thread that holds it keeps all others' calls into the context waiting.
class ContextLock {
 public:
  // Waits until no other thread holds it.
  void pass();
  void take();
  void give_back();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread::id owner_;
  unsigned depth_ = 0;
};

struct Context {
  std::shared_ptr<ContextLock> lock = std::make_shared<ContextLock>();
  // An error that a stream ran into: every later call returns it.
  std::atomic<CUresult> sticky = CUDA_SUCCESS;
  CUcontext handle = nullptr;
  CUdevice device = 0;
  std::shared_ptr<Stream> legacy;
  std::unordered_map<CUstream, std::shared_ptr<Stream>> streams;
  std::vector<std::shared_ptr<Stream>> destroyed;  // still run their queued work
  std::set<CUcontext> peers;                       // contexts whose memory its kernels reach
  std::vector<std::shared_ptr<Channel>> channels;  // channels of other streams, in turn
  std::vector<std::shared_ptr<Channel>> urgent;    // channels of streams with the highest priority
  std::size_t next_channel = 0;
};

// The stream on which work is to be queued, and what the work comes after.
struct Place {
  std::shared_ptr<Stream> stream;
  Context* context = nullptr;
  std::vector<PointPtr> after;
  CapturePtr capture;  // null if the stream is not captured

  // Queues work on the stream. Returns null if the work becomes part of a graph.
  PointPtr enqueue(std::function<void()> work);
  // Queues work that runs until `done` returns true. `holds`: it holds its stream's channel until
  // then.
  PointPtr enqueue_until(std::function<bool()> done, bool holds = true);
  // Waits until the stream has room for more work.
  void await_room() const {
    if (!capture) stream->await_room();
  }
};

class Driver {
 public:
  static Driver& instance();

  // Makes those devices visible, of two, that CUDA_VISIBLE_DEVICES names.
  CUresult initialise();
  std::atomic<bool> initialised = false;
  Memory memory;
  Captures captures;

  // --- devices
  int devices() const { return static_cast<int>(visible_.size()); }
  bool is_device(CUdevice device) const { return device >= 0 && device < devices(); }
  // Convert to a device's number on the machine, and back: -1 if it is not visible.
  int physical(CUdevice device) const { return visible_[static_cast<std::size_t>(device)]; }
  CUdevice visible(int physical) const;

  // --- contexts
  CUresult retain(CUdevice device, CUcontext* context);
  CUresult release(CUdevice device);
  // Ends the context with all that it has, even if it is retained; the next retain() makes a new
  // one.
  CUresult reset(CUdevice device);
  // Gets the calling thread's context, or returns why a call that needs one is refused.
  CUresult current(Context** context) const;
  // Does the same for a call that a capture may forbid.
  CUresult current_for_unsafe(Context** context);
  static std::vector<CUcontext>& stack();
  // Returns null if the context has been destroyed.
  Context* of(CUcontext context) const;
  // True if kernels are loaded when they are first needed (CUDA_MODULE_LOADING).
  static bool lazy();
  bool active(CUdevice device) const;
  // True if kernels of the context reach the memory.
  bool reaches(CUcontext context, const Mapping& mapping) const;
  CUresult set_peer(CUcontext peer, bool enabled);

  // --- streams; 0 and CU_STREAM_LEGACY mean the legacy stream of the current context, which is
  // ordered with all blocking streams
  static constexpr int kHighestPriority = -5;
  CUresult make_stream(CUcontext in, bool blocking, int priority, CUstream* stream);
  CUresult destroy_stream(CUstream stream);
  CUresult place(CUstream stream, Place* place);
  // Finds the place of a stream to wait for it or query it, which no capture allows.
  CUresult place_for_wait(CUstream stream, Place* place);
  // Waits for all work that is queued in the context.
  void synchronize(Context& context);

  // --- events
  CUevent make_event(CUcontext in);
  CUresult destroy_event(CUevent event);
  CUresult record(CUevent event, const Place& place);
  // Gets the point that the event was recorded at; null, without an error, if it never was. Returns
  // the error of the event's context, once that has one.
  CUresult recorded(CUevent event, PointPtr* point) const;
  // Makes all work queued at the place from now on come after the event.
  CUresult wait_for(CUevent event, Place& place);

  // --- graphs
  CUgraph keep_graph(std::unique_ptr<Graph> graph);
  CUresult destroy_graph(CUgraph graph);
  CUresult instantiate(CUgraph graph, CUgraphExec* exec);
  CUresult destroy_exec(CUgraphExec exec);
  CUresult launch(CUgraphExec exec, Place& place);

  // The number of calls that made their thread wait for a stream. For tests: an engine thread must
  // not.
  std::atomic<std::uint64_t> waits = 0;
  // The number of calls of engine threads that may wait for a stream or a context's lock.
  std::atomic<std::uint64_t> by_engines = 0;
  std::atomic<void (*)(void)> on_flush = nullptr;
  std::atomic<std::size_t> holding = 0;
  std::atomic<bool> same_handles = false;
  // Set and return attributes, for tests.
  void set_attribute(int attribute, int value);
  std::optional<int> attribute(int attribute) const;
  void fault(CUdevice device);
  std::size_t retained() const;
  std::atomic<bool> peers_reach = true;
  std::atomic<bool> peers_corrupt = false;
  void wait(const PointPtr& point);

 private:
  Driver() = default;
  CUresult current_now(Context** context) const;
  // Waits for the lock of this stream's context.
  void pass(CUstream stream) const;
  static void make_channels(Context& context);

  mutable std::recursive_mutex mutex_;
  std::vector<int> visible_;
  std::map<CUdevice, std::unique_ptr<Context>> contexts_;
  std::map<CUdevice, unsigned> retained_;
  std::map<CUdevice, CUcontext> last_;  // handles of contexts that were reset
  std::map<int, int> attributes_;
  struct Event {
    CUcontext context = nullptr;
    PointPtr recorded;
    CapturePtr capture;  // the capture that it was recorded in, if any, and after which nodes
    std::set<std::size_t> nodes;
  };
  std::unordered_map<CUevent, Event> events_;
  std::unordered_map<CUgraph, std::shared_ptr<const Graph>> graphs_;
  struct Executable {
    std::shared_ptr<const Graph> graph;
    PointPtr last;  // end of the last run; there is one run at a time
  };
  std::unordered_map<CUgraphExec, Executable> executables_;
  // Handles are numbers, and none is given out twice; 0, 1 and 2 mean special streams.
  std::uintptr_t last_handle_ = 0x1000;
  std::uint64_t seed_ = 1;
};

// Holds a context's lock, and waits until its streams are idle; other threads that call into the
// context meanwhile wait.
class Exclusive {
 public:
  explicit Exclusive(Context& context) : lock_(context.lock) {
    ++Driver::instance().holding;
    lock_->take();
    Driver::instance().synchronize(context);
  }
  ~Exclusive() {
    lock_->give_back();
    --Driver::instance().holding;
  }
  Exclusive(const Exclusive&) = delete;
  Exclusive& operator=(const Exclusive&) = delete;

 private:
  std::shared_ptr<ContextLock> lock_;
};

}  // namespace kvxfer::cuda_double
