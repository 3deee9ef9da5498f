#include "driver.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace kvxfer::cuda_double {
namespace {

void note_engine_thread() {
  std::array<char, 16> name{};
  ::prctl(PR_GET_NAME, name.data());
  if (std::string_view(name.data()) == "kvxfer-engine") ++Driver::instance().by_engines;
}

}  // namespace

Driver& Driver::instance() {
  static Driver* const driver = new Driver;  // the streams' threads outlive main()
  return *driver;
}

// --- devices ---------------------------------------------------------------------------------

CUresult Driver::initialise() {
  const std::lock_guard lock(mutex_);
  if (!initialised) {
    const char* const named = std::getenv("CUDA_VISIBLE_DEVICES");
    std::istringstream numbers(named ? named : "0,1");
    for (std::string number; std::getline(numbers, number, ',');) {
      if (number != "0" && number != "1") break;
      visible_.push_back(number == "1" ? 1 : 0);
    }
    if (!visible_.empty()) initialised = true;
  }
  return initialised ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUdevice Driver::visible(int physical) const {
  const auto found = std::find(visible_.begin(), visible_.end(), physical);
  return found == visible_.end() ? -1 : static_cast<CUdevice>(found - visible_.begin());
}

// --- contexts --------------------------------------------------------------------------------

void ContextLock::pass() {
  note_engine_thread();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return depth_ == 0 || owner_ == std::this_thread::get_id(); });
}

void ContextLock::take() {
  note_engine_thread();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return depth_ == 0 || owner_ == std::this_thread::get_id(); });
  owner_ = std::this_thread::get_id();
  ++depth_;
}

void ContextLock::give_back() {
  const std::lock_guard lock(mutex_);
  --depth_;
  changed_.notify_all();
}

bool Driver::lazy() {
  const char* const set = std::getenv("CUDA_MODULE_LOADING");
  return !set || std::string_view(set) != "EAGER";
}

void Driver::make_channels(Context& context) {
  const char* const set = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const auto count = static_cast<std::size_t>(std::clamp(set ? std::atoi(set) : 8, 1, 32));
  for (std::size_t i = 0; i < count; ++i) {
    context.channels.push_back(std::make_shared<Channel>());
    context.urgent.push_back(std::make_shared<Channel>());
  }
}

std::vector<CUcontext>& Driver::stack() {
  thread_local std::vector<CUcontext> stack;
  return stack;
}

CUresult Driver::retain(CUdevice device, CUcontext* context) {
  const std::lock_guard lock(mutex_);
  if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  auto& known = contexts_[device];
  if (!known) {
    known = std::make_unique<Context>();
    const CUcontext last = same_handles ? last_[device] : nullptr;
    known->handle = last ? last : reinterpret_cast<CUcontext>(++last_handle_);
    known->device = device;
    make_channels(*known);
    known->legacy = std::make_shared<Stream>(known->handle, true, known->channels[0], seed_++);
  }
  ++retained_[device];
  *context = known->handle;
  return CUDA_SUCCESS;
}

CUresult Driver::release(CUdevice device) {
  {
    const std::lock_guard lock(mutex_);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    unsigned& retained = retained_[device];
    if (retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--retained > 0) return CUDA_SUCCESS;
  }
  return reset(device);
}

CUresult Driver::reset(CUdevice device) {
  std::unique_ptr<Context> ended;
  {
    const std::lock_guard lock(mutex_);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    ended = std::move(contexts_[device]);
  }
  if (!ended) return CUDA_SUCCESS;
  const CUcontext context = ended->handle;
  {
    const std::lock_guard lock(mutex_);
    last_[device] = context;
  }
  ended.reset();  // the streams finish their work, which may call the driver
  memory.drop(context);
  return CUDA_SUCCESS;
}

Context* Driver::of(CUcontext context) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [device, known] : contexts_) {
    if (known && known->handle == context) return known.get();
  }
  return nullptr;
}

bool Driver::active(CUdevice device) const {
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(device);
  return found != contexts_.end() && found->second;
}

bool Driver::reaches(CUcontext context, const Mapping& mapping) const {
  const std::lock_guard lock(mutex_);
  const Context* const from = of(context);
  if (!from) return false;
  switch (mapping.kind) {
    case Kind::host:
    case Kind::registered:
    case Kind::managed:
      return true;
    case Kind::vmm:
      return mapping.access.contains(from->device);
    case Kind::pool:
      return mapping.device == from->device;
    case Kind::device:
    case Kind::imported:
      return mapping.context == context || from->peers.contains(mapping.context);
  }
  return false;
}

CUresult Driver::set_peer(CUcontext peer, bool enabled) {
  const std::lock_guard lock(mutex_);
  Context* context = nullptr;
  if (const CUresult bad = current_now(&context); bad != CUDA_SUCCESS) return bad;
  if (peer == context->handle || !of(peer)) return CUDA_ERROR_INVALID_CONTEXT;
  if (enabled && !peers_reach) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  if (enabled) {
    return context->peers.insert(peer).second ? CUDA_SUCCESS
                                              : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  }
  return context->peers.erase(peer) > 0 ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

CUresult Driver::current(Context** context) const {
  pass(nullptr);
  return current_now(context);
}

void Driver::pass(CUstream stream) const {
  std::shared_ptr<ContextLock> lock;
  {
    const std::lock_guard guard(mutex_);
    const Context* const current = stack().empty() ? nullptr : of(stack().back());
    if (current) lock = current->lock;
    for (const auto& [device, context] : contexts_) {
      if (context && context->streams.contains(stream)) lock = context->lock;
    }
  }
  if (lock) lock->pass();
}

CUresult Driver::current_now(Context** context) const {
  if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  Context* const found = of(stack().back());
  if (!found) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (const CUresult sticky = found->sticky; sticky != CUDA_SUCCESS) return sticky;
  *context = found;
  return CUDA_SUCCESS;
}

CUresult Driver::current_for_unsafe(Context** context) {
  if (const CUresult bad = current(context); bad != CUDA_SUCCESS) return bad;
  return captures.unsafe();
}

// --- settings of tests -----------------------------------------------------------------------

void Driver::set_attribute(int attribute, int value) {
  const std::lock_guard lock(mutex_);
  attributes_[attribute] = value;
}

std::optional<int> Driver::attribute(int attribute) const {
  const std::lock_guard lock(mutex_);
  const auto found = attributes_.find(attribute);
  if (found == attributes_.end() || found->second < 0) return std::nullopt;
  return found->second;
}

void Driver::fault(CUdevice device) {
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(device);
  if (found != contexts_.end() && found->second) {
    found->second->sticky = CUDA_ERROR_MPS_CLIENT_TERMINATED;
  }
}

std::size_t Driver::retained() const {
  const std::lock_guard lock(mutex_);
  std::size_t all = 0;
  for (const auto& [device, count] : retained_) all += count;
  return all;
}

// --- streams ---------------------------------------------------------------------------------

CUresult Driver::make_stream(CUcontext in, bool blocking, int priority, CUstream* stream) {
  const std::lock_guard lock(mutex_);
  Context* const context = of(in);
  *stream = reinterpret_cast<CUstream>(++last_handle_);
  const auto& channels = priority <= kHighestPriority ? context->urgent : context->channels;
  const auto& channel = channels[++context->next_channel % channels.size()];
  context->streams.emplace(*stream, std::make_shared<Stream>(in, blocking, channel, seed_++));
  return CUDA_SUCCESS;
}

CUresult Driver::destroy_stream(CUstream stream) {
  pass(stream);
  const std::lock_guard lock(mutex_);
  for (const auto& [device, context] : contexts_) {
    if (!context) continue;
    const auto found = context->streams.find(stream);
    if (found == context->streams.end()) continue;
    std::erase_if(context->destroyed, [](const auto& ended) { return ended->last()->reached(); });
    context->destroyed.push_back(std::move(found->second));
    context->streams.erase(found);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_HANDLE;
}

CUresult Driver::place(CUstream stream, Place* place) {
  pass(stream);
  const std::lock_guard lock(mutex_);
  if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (stream == nullptr || stream == CU_STREAM_LEGACY) {
    if (const CUresult bad = current_now(&place->context); bad != CUDA_SUCCESS) return bad;
    place->stream = place->context->legacy;
    for (const auto& [handle, other] : place->context->streams) {
      if (!other->blocking()) continue;
      if (const CapturePtr capture = captures.of(*other)) {
        capture->invalidate();
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
      }
      place->after.push_back(other->last());
    }
    return CUDA_SUCCESS;
  }
  if (stream == CU_STREAM_PER_THREAD) return CUDA_ERROR_NOT_SUPPORTED;
  for (const auto& [device, context] : contexts_) {
    if (!context) continue;
    const auto found = context->streams.find(stream);
    if (found == context->streams.end()) continue;
    if (const CUresult sticky = context->sticky; sticky != CUDA_SUCCESS) return sticky;
    place->stream = found->second;
    place->context = context.get();
    place->capture = captures.of(*place->stream);
    if (place->capture) {
      return place->capture->invalid() ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    }
    if (place->stream->blocking()) place->after.push_back(context->legacy->last());
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_HANDLE;
}

CUresult Driver::place_for_wait(CUstream stream, Place* place) {
  if (const CUresult bad = this->place(stream, place); bad != CUDA_SUCCESS) return bad;
  if (!place->capture) return captures.unsafe();
  place->capture->invalidate();
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

PointPtr Place::enqueue(std::function<void()> work) {
  const auto once = [work = std::move(work)] {
    work();
    return true;
  };
  return enqueue_until(once, false);
}

PointPtr Place::enqueue_until(std::function<bool()> done, bool holds) {
  if (!capture) return stream->enqueue_until(std::move(done), std::move(after), holds);
  capture->add(*stream, std::move(done));
  return nullptr;
}

void Driver::synchronize(Context& context) {
  std::vector<PointPtr> points;
  {
    const std::lock_guard lock(mutex_);
    points.push_back(context.legacy->last());
    for (const auto& [handle, stream] : context.streams) points.push_back(stream->last());
    for (const auto& stream : context.destroyed) points.push_back(stream->last());
  }
  for (const PointPtr& point : points) wait(point);
}

void Driver::wait(const PointPtr& point) {
  note_engine_thread();
  if (point->reached()) return;
  ++waits;
  point->wait();
}

// --- events ----------------------------------------------------------------------------------

CUevent Driver::make_event(CUcontext in) {
  const std::lock_guard lock(mutex_);
  const auto handle = reinterpret_cast<CUevent>(++last_handle_);
  events_[handle] = {.context = in, .recorded = nullptr};
  return handle;
}

CUresult Driver::destroy_event(CUevent event) {
  const std::lock_guard lock(mutex_);
  return events_.erase(event) > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult Driver::record(CUevent event, const Place& place) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end() || found->second.context != place.context->handle) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (place.capture) {
    found->second.capture = place.capture;
    found->second.nodes = place.capture->tails(*place.stream);
  } else {
    found->second.capture = nullptr;
    found->second.recorded = place.stream->last();
  }
  return CUDA_SUCCESS;
}

CUresult Driver::recorded(CUevent event, PointPtr* point) const {
  const auto lock_of = [&]() -> std::shared_ptr<ContextLock> {
    const std::lock_guard lock(mutex_);
    const auto found = events_.find(event);
    const Context* const context = found == events_.end() ? nullptr : of(found->second.context);
    return context ? context->lock : nullptr;
  };
  if (const auto lock = lock_of()) lock->pass();
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (found->second.capture) return CUDA_ERROR_CAPTURED_EVENT;
  *point = found->second.recorded;
  const Context* const context = of(found->second.context);
  return context ? context->sticky.load() : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult Driver::wait_for(CUevent event, Place& place) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return CUDA_ERROR_INVALID_HANDLE;
  const auto& [context, recorded, capture, nodes] = found->second;
  if (capture && capture->ended()) return CUDA_ERROR_CAPTURED_EVENT;
  if (capture && (!place.capture || place.capture == capture)) {
    if (place.stream == place.context->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (capture->invalid()) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    capture->join(*place.stream, nodes);
    return CUDA_SUCCESS;
  }
  if (place.capture) {
    place.capture->invalidate();
    if (!capture) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    capture->invalidate();
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (!recorded) return CUDA_SUCCESS;
  place.after.push_back(recorded);
  place.enqueue([] {});
  return CUDA_SUCCESS;
}

// --- graphs ----------------------------------------------------------------------------------

CUgraph Driver::keep_graph(std::unique_ptr<Graph> graph) {
  const std::lock_guard lock(mutex_);
  const auto handle = reinterpret_cast<CUgraph>(++last_handle_);
  graphs_[handle] = std::move(graph);
  return handle;
}

CUresult Driver::destroy_graph(CUgraph graph) {
  const std::lock_guard lock(mutex_);
  return graphs_.erase(graph) > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Driver::instantiate(CUgraph graph, CUgraphExec* exec) {
  const std::lock_guard lock(mutex_);
  const auto found = graphs_.find(graph);
  if (!exec || found == graphs_.end()) return CUDA_ERROR_INVALID_VALUE;
  *exec = reinterpret_cast<CUgraphExec>(++last_handle_);
  executables_[*exec] = {.graph = found->second, .last = nullptr};
  return CUDA_SUCCESS;
}

CUresult Driver::destroy_exec(CUgraphExec exec) {
  const std::lock_guard lock(mutex_);
  return executables_.erase(exec) > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Driver::launch(CUgraphExec exec, Place& place) {
  const std::lock_guard lock(mutex_);
  const auto found = executables_.find(exec);
  if (found == executables_.end()) return CUDA_ERROR_INVALID_VALUE;
  if (place.capture) return CUDA_ERROR_NOT_SUPPORTED;
  auto& [graph, last] = found->second;
  if (last) place.after.push_back(last);
  const auto run = std::make_shared<GraphRun>(*graph, static_cast<unsigned>(seed_++));
  last = place.enqueue_until([run] { return run->step(); });
  return CUDA_SUCCESS;
}

}  // namespace kvxfer::cuda_double
