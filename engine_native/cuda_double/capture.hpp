// Capture of the double: what is queued on a stream becomes a graph instead of running.
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
  std::function<bool()> step;  // until it says that it is done
  std::set<std::size_t> after;
};
using Graph = std::vector<Node>;

// One run of a graph: nodes without an edge between them run in any order, and side by side.
class GraphRun {
 public:
  GraphRun(Graph graph, unsigned seed);
  bool step();

 private:
  Graph graph_;  // its own: steps remember how far they got
  std::set<std::size_t> left_;
  std::minstd_rand random_;
};

// The streams that one cuStreamBeginCapture() has caught: the one it was called on, and those that
// waited for an event of it since.
class Capture {
 public:
  Capture(const Stream& origin, CUstreamCaptureMode mode) : origin_(&origin), mode_(mode) {
    tails_[&origin] = {};
  }

  const Stream* origin() const { return origin_; }
  CUstreamCaptureMode mode() const { return mode_; }
  // That which has begun it.
  std::thread::id thread() const { return thread_; }

  void add(const Stream& stream, std::function<bool()> step);
  // What the next work of the stream comes after.
  std::set<std::size_t> tails(const Stream& stream) const;
  // From now on it comes after these, too; the stream joins where it is not in.
  void join(const Stream& stream, const std::set<std::size_t>& nodes);
  bool has(const Stream& stream) const;
  void invalidate();
  bool invalid() const;
  // The graph, where all of it comes before the end of the origin; else null.
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
  // Null where the stream is not captured.
  CapturePtr of(const Stream& stream) const;
  // For calls that are "potentially unsafe" (cuThreadExchangeStreamCaptureMode): a capture that
  // forbids them to this thread is lost by the attempt.
  CUresult unsafe();
  // The calling thread's.
  static CUstreamCaptureMode& mode();

 private:
  mutable std::mutex mutex_;
  std::vector<CapturePtr> active_;
};

}  // namespace kvxfer::cuda_double
