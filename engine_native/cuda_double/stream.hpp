// Streams and events of the double: threads that take their time, and CUDA's rules of order and
// nothing more. What is on two streams has no order but by an event, a word, or the legacy stream.
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

// A queue of the hardware's, which several streams share: what is at its head holds it until it has
// begun, and a wait until it is over.
class Channel {
 public:
  // What was queued there last; `begun` is from now on.
  PointPtr follow(PointPtr begun);

 private:
  std::mutex mutex_;
  PointPtr last_;
};

class Stream {
 public:
  // Launches on a stream that does not get on; the next one waits for room.
  static constexpr std::size_t kMostQueued = 1024;

  // `blocking`: ordered with the legacy stream.
  Stream(CUcontext context, bool blocking, std::shared_ptr<Channel> channel, std::uint64_t seed);
  // Ends what is queued first.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  CUcontext context() const { return context_; }
  bool blocking() const { return blocking_; }

  // Waits until fewer than kMostQueued are queued.
  void await_room();
  // Once all before it has run and these points are reached, it is run until it says that it is
  // done. `holds`: its channel, until then.
  PointPtr enqueue_until(std::function<bool()> done, std::vector<PointPtr> after = {},
                         bool holds = true);
  // Where all that is queued now has run.
  PointPtr last() const;
  // That of the stream whose work the calling thread runs; null for other threads.
  static CUcontext& running();

 private:
  struct Work {
    std::vector<PointPtr> after;
    std::function<bool()> step;
    PointPtr end;
    PointPtr begun;  // for its channel
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
  std::thread thread_;  // last
};

// The longest pause of a stream before a piece of work, in microseconds: CUDA_DOUBLE_DELAY_US, 200.
std::uint64_t longest_delay_us();

}  // namespace kvxfer::cuda_double
