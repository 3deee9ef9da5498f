#include "driver.hpp"

#include <algorithm>
#include <utility>

namespace kvxfer::cuda_double {

Driver& Driver::instance() {
  static Driver* const driver = new Driver;  // its streams' threads outlive main()
  return *driver;
}

// --- contexts --------------------------------------------------------------------------------

std::vector<CUcontext>& Driver::stack() {
  thread_local std::vector<CUcontext> stack;
  return stack;
}

CUresult Driver::retain(CUdevice device, CUcontext* context) {
  const std::lock_guard lock(mutex_);
  if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (device < 0 || device >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  auto& known = contexts_[static_cast<std::size_t>(device)];
  if (!known) {
    known = std::make_unique<Context>();
    known->handle = reinterpret_cast<CUcontext>(++last_handle_);
    known->device = device;
    known->legacy = std::make_shared<Stream>(known->handle, true, seed_++);
  }
  ++known->retained;
  *context = known->handle;
  return CUDA_SUCCESS;
}

CUresult Driver::release(CUdevice device) {
  if (device < 0 || device >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  std::unique_ptr<Context> ended;
  {
    const std::lock_guard lock(mutex_);
    auto& known = contexts_[static_cast<std::size_t>(device)];
    if (!known) return CUDA_ERROR_INVALID_CONTEXT;
    if (--known->retained == 0) ended = std::move(known);
  }
  if (!ended) return CUDA_SUCCESS;
  const CUcontext context = ended->handle;
  ended.reset();  // its streams end what they have, which may call
  memory.drop(context);
  return CUDA_SUCCESS;
}

Context* Driver::of(CUcontext context) const {
  const std::lock_guard lock(mutex_);
  for (const auto& known : contexts_) {
    if (known && known->handle == context) return known.get();
  }
  return nullptr;
}

bool Driver::active(CUdevice device) const {
  const std::lock_guard lock(mutex_);
  return contexts_[static_cast<std::size_t>(device)] != nullptr;
}

CUresult Driver::current(Context** context) const {
  if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  Context* const found = of(stack().back());
  if (!found) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (const CUresult sticky = found->sticky; sticky != CUDA_SUCCESS) return sticky;
  *context = found;
  return CUDA_SUCCESS;
}

// --- streams ---------------------------------------------------------------------------------

CUresult Driver::make_stream(CUcontext in, bool blocking, CUstream* stream) {
  const std::lock_guard lock(mutex_);
  Context* const context = of(in);
  *stream = reinterpret_cast<CUstream>(++last_handle_);
  context->streams.emplace(*stream, std::make_shared<Stream>(in, blocking, seed_++));
  return CUDA_SUCCESS;
}

CUresult Driver::destroy_stream(CUstream stream) {
  const std::lock_guard lock(mutex_);
  for (const auto& context : contexts_) {
    if (!context) continue;
    const auto found = context->streams.find(stream);
    if (found == context->streams.end()) continue;
    context->destroyed.push_back(std::move(found->second));
    context->streams.erase(found);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_HANDLE;
}

CUresult Driver::place(CUstream stream, Place* place) {
  const std::lock_guard lock(mutex_);
  if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (stream == nullptr || stream == CU_STREAM_LEGACY) {
    if (const CUresult bad = current(&place->context); bad != CUDA_SUCCESS) return bad;
    place->stream = place->context->legacy;
    for (const auto& [handle, other] : place->context->streams) {
      if (other->blocking()) place->after.push_back(other->last());
    }
    return CUDA_SUCCESS;
  }
  if (stream == CU_STREAM_PER_THREAD) return CUDA_ERROR_NOT_SUPPORTED;
  for (const auto& context : contexts_) {
    if (!context) continue;
    const auto found = context->streams.find(stream);
    if (found == context->streams.end()) continue;
    if (const CUresult sticky = context->sticky; sticky != CUDA_SUCCESS) return sticky;
    place->stream = found->second;
    place->context = context.get();
    if (place->stream->blocking()) place->after.push_back(context->legacy->last());
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_HANDLE;
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

CUresult Driver::record(CUevent event, CUcontext in, PointPtr point) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end() || found->second.context != in) return CUDA_ERROR_INVALID_HANDLE;
  found->second.recorded = std::move(point);
  return CUDA_SUCCESS;
}

CUresult Driver::recorded(CUevent event, PointPtr* point) const {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return CUDA_ERROR_INVALID_HANDLE;
  *point = found->second.recorded;
  return CUDA_SUCCESS;
}

}  // namespace kvxfer::cuda_double
