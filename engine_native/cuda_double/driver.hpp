// What the calls of the double have in common: contexts, what is current on a thread, and what is
// wrong.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "memory.hpp"
#include "stream.hpp"

namespace kvxfer::cuda_double {

struct Context {
  // An error that a stream ran into: every later call returns it.
  std::atomic<CUresult> sticky = CUDA_SUCCESS;
  CUcontext handle = nullptr;
  CUdevice device = 0;
  unsigned retained = 0;
  std::shared_ptr<Stream> legacy;
  std::unordered_map<CUstream, std::shared_ptr<Stream>> streams;
  std::vector<std::shared_ptr<Stream>> destroyed;  // they still run what was queued
};

class Driver {
 public:
  static constexpr int kDevices = 2;

  static Driver& instance();

  bool initialised = false;
  Memory memory;

  // --- contexts
  CUresult retain(CUdevice device, CUcontext* context);
  CUresult release(CUdevice device);
  // The calling thread's, or why a call that needs one is refused.
  CUresult current(Context** context) const;
  static std::vector<CUcontext>& stack();
  // Null where it has been destroyed.
  Context* of(CUcontext context) const;
  bool active(CUdevice device) const;

  // --- streams; 0 and CU_STREAM_LEGACY are the legacy one of the current context, which is ordered
  // with all blocking ones
  CUresult make_stream(CUcontext in, bool blocking, CUstream* stream);
  CUresult destroy_stream(CUstream stream);
  // Where work is to be queued, and what it has to wait for there.
  struct Place {
    std::shared_ptr<Stream> stream;
    Context* context = nullptr;
    std::vector<PointPtr> after;
  };
  CUresult place(CUstream stream, Place* place);
  // All that is queued in the context.
  void synchronize(Context& context);

  // --- events
  CUevent make_event(CUcontext in);
  CUresult destroy_event(CUevent event);
  CUresult record(CUevent event, CUcontext in, PointPtr point);
  // Null, and no error, if it never was.
  CUresult recorded(CUevent event, PointPtr* point) const;

  // How often a call has made its thread wait for a stream. For tests: an engine thread must not.
  std::atomic<std::uint64_t> waits = 0;
  void wait(const PointPtr& point);

 private:
  Driver() = default;

  mutable std::recursive_mutex mutex_;
  std::array<std::unique_ptr<Context>, kDevices> contexts_;
  struct Event {
    CUcontext context = nullptr;
    PointPtr recorded;
  };
  std::unordered_map<CUevent, Event> events_;
  // Handles are numbers, and none is given out twice; 0, 1 and 2 mean special streams.
  std::uintptr_t last_handle_ = 0x1000;
  std::uint64_t seed_ = 1;
};

}  // namespace kvxfer::cuda_double
