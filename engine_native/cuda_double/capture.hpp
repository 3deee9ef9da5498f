// Stream capture of the double: work queued on a captured stream becomes a graph instead of
// running.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "stream.hpp"

namespace kvxfer::cuda_double {

struct Node {
  std::function<bool()> step;  // called until it returns true
  std::set<std::size_t> after;
};
using Graph = std::vector<Node>;

// One run of a graph: nodes without an edge between them run in any order, and side by side.
class GraphRun {
 public:
  GraphRun(Graph graph, unsigned seed);
  bool step();

 private:
  Graph graph_;  // a copy, because steps remember how far they got
  std::set<std::size_t> left_;
  std::minstd_rand random_;
};

// The streams of one cuStreamBeginCapture(): the one that it was called on, and those that have
// waited for an event of the capture since.
class Capture {
 public:
  Capture(const Stream& origin, CUstreamCaptureMode mode) : origin_(&origin), mode_(mode) {
    tails_[&origin] = {};
  }

  const Stream* origin() const { return origin_; }
  CUstreamCaptureMode mode() const { return mode_; }
  // Returns the thread that began the capture.
  std::thread::id thread() const { return thread_; }

  void add(const Stream& stream, std::function<bool()> step);
  // Returns the nodes that the next work of the stream comes after.
  std::set<std::size_t> tails(const Stream& stream) const;
  // Makes the stream's next work come after these nodes, too; adds the stream if it is not
  // captured.
  void join(const Stream& stream, const std::set<std::size_t>& nodes);
  bool has(const Stream& stream) const;
  void invalidate();
  bool invalid() const;
  // Ends the capture. Returns the graph, or null if not all of it comes before the end of the
  // origin.
  std::unique_ptr<Graph> end();
  bool ended() const;

 private:
  const Stream* const origin_;
  const CUstreamCaptureMode mode_;
  const std::thread::id thread_ = std::this_thread::get_id();
  mutable std::mutex mutex_;
  bool invalid_ = false;
  bool ended_ = false;
  Graph graph_;
  std::map<const Stream*, std::set<std::size_t>> tails_;
};
using CapturePtr = std::shared_ptr<Capture>;

// All captures that have begun and not ended.
class Captures {
 public:
  CUresult begin(const Stream& stream, CUstreamCaptureMode mode);
  CUresult end(const Stream& stream, std::unique_ptr<Graph>* graph);
  // Returns the stream's capture; null if there is none.
  CapturePtr of(const Stream& stream) const;
  // Checks a call that is "potentially unsafe" (cuThreadExchangeStreamCaptureMode): it invalidates
  // each capture that forbids such calls to this thread.
  CUresult unsafe();
  // Returns the calling thread's mode.
  static CUstreamCaptureMode& mode();

 private:
  mutable std::mutex mutex_;
  std::vector<CapturePtr> active_;
};

}  // namespace kvxfer::cuda_double
