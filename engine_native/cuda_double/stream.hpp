// Streams and events of the double: threads that run work after pauses, in the order of CUDA's
// rules and no other. Work on two streams is ordered only by an event, a word, or the legacy
// stream.
#pragma once

#include <cuda.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace kvxfer::cuda_double {

// A point in a stream.
class Point {
 public:
  bool reached() const;
  void reach();
  void wait() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool reached_ = false;
};
using PointPtr = std::shared_ptr<Point>;

// A hardware queue that several streams share. The work at its head holds it until it has begun; a
// wait holds it until it is over.
class Channel {
 public:
  // Returns the point that was queued last, and queues `begun` behind it.
  PointPtr follow(PointPtr begun);

 private:
  std::mutex mutex_;
  PointPtr last_;
};

class Stream {
 public:
  // The most launches on a stream that makes no progress; the next one waits for room.
  static constexpr std::size_t kMostQueued = 1024;

  // `blocking`: the stream is ordered with the legacy stream.
  Stream(CUcontext context, bool blocking, std::shared_ptr<Channel> channel, std::uint64_t seed);
  // Finishes queued work first.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  CUcontext context() const { return context_; }
  bool blocking() const { return blocking_; }

  // Waits until fewer than kMostQueued are queued.
  void await_room();
  // Queues work: `done` is called until it returns true, once all work before it has run and the
  // points `after` are reached. `holds`: it holds its channel until then.
  PointPtr enqueue_until(std::function<bool()> done, std::vector<PointPtr> after = {},
                         bool holds = true);
  // Returns the point at which all work that is queued now has run.
  PointPtr last() const;
  // Returns the context of the stream whose work the calling thread runs; null for other threads.
  static CUcontext& running();

 private:
  struct Work {
    std::vector<PointPtr> after;
    std::function<bool()> step;
    PointPtr end;
    PointPtr begun;  // reached once the work has begun; for the channel
    bool holds;
  };
  void serve(std::uint64_t seed);

  CUcontext context_;
  bool blocking_;
  std::shared_ptr<Channel> channel_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  PointPtr last_;
  bool stopping_ = false;
  std::thread thread_;  // last, because it uses the other members
};

// Returns the longest pause of a stream before a piece of work, in microseconds:
// CUDA_DOUBLE_DELAY_US, or 200.
std::uint64_t longest_delay_us();

}  // namespace kvxfer::cuda_double
