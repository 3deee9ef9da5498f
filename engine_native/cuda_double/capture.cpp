#include "capture.hpp"

#include <algorithm>
#include <utility>

namespace kvxfer::cuda_double {

GraphRun::GraphRun(Graph graph, unsigned seed) : graph_(std::move(graph)), random_(seed) {
  for (std::size_t node = 0; node < graph_.size(); ++node) left_.insert(node);
}

bool GraphRun::step() {
  std::vector<std::size_t> ready;
  for (const std::size_t node : left_) {
    const auto& after = graph_[node].after;
    if (std::none_of(after.begin(), after.end(), [&](auto n) { return left_.contains(n); })) {
      ready.push_back(node);
    }
  }
  std::shuffle(ready.begin(), ready.end(), random_);
  for (const std::size_t node : ready) {
    if (graph_[node].step()) left_.erase(node);
  }
  return left_.empty();
}

void Capture::add(const Stream& stream, std::function<bool()> step) {
  const std::lock_guard lock(mutex_);
  auto& tails = tails_[&stream];
  graph_.push_back({std::move(step), std::exchange(tails, {})});
  tails.insert(graph_.size() - 1);
}

std::set<std::size_t> Capture::tails(const Stream& stream) const {
  const std::lock_guard lock(mutex_);
  return tails_.at(&stream);
}

void Capture::join(const Stream& stream, const std::set<std::size_t>& nodes) {
  const std::lock_guard lock(mutex_);
  tails_[&stream].insert(nodes.begin(), nodes.end());
}

bool Capture::has(const Stream& stream) const {
  const std::lock_guard lock(mutex_);
  return tails_.contains(&stream);
}

void Capture::invalidate() {
  const std::lock_guard lock(mutex_);
  invalid_ = true;
}

bool Capture::invalid() const {
  const std::lock_guard lock(mutex_);
  return invalid_;
}

bool Capture::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

std::unique_ptr<Graph> Capture::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  std::set<std::size_t> before;
  std::vector<std::size_t> reached(tails_[origin_].begin(), tails_[origin_].end());
  while (!reached.empty()) {
    const std::size_t node = reached.back();
    reached.pop_back();
    if (!before.insert(node).second) continue;
    reached.insert(reached.end(), graph_[node].after.begin(), graph_[node].after.end());
  }
  if (before.size() < graph_.size()) return nullptr;
  return std::make_unique<Graph>(std::move(graph_));
}

// --- all of them -----------------------------------------------------------------------------

CUstreamCaptureMode& Captures::mode() {
  thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  return mode;
}

CUresult Captures::begin(const Stream& stream, CUstreamCaptureMode mode) {
  if (of(stream)) return CUDA_ERROR_ILLEGAL_STATE;
  const std::lock_guard lock(mutex_);
  active_.push_back(std::make_shared<Capture>(stream, mode));
  return CUDA_SUCCESS;
}

CUresult Captures::end(const Stream& stream, std::unique_ptr<Graph>* graph) {
  const CapturePtr capture = of(stream);
  if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin() != &stream) {
    capture->invalidate();
    return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  }
  if (capture->mode() != CU_STREAM_CAPTURE_MODE_RELAXED &&
      capture->thread() != std::this_thread::get_id()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  {
    const std::lock_guard lock(mutex_);
    std::erase(active_, capture);
  }
  *graph = capture->end();
  if (capture->invalid()) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  return *graph ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
}

CapturePtr Captures::of(const Stream& stream) const {
  const std::lock_guard lock(mutex_);
  const auto found =
      std::find_if(active_.begin(), active_.end(), [&](const auto& c) { return c->has(stream); });
  return found == active_.end() ? nullptr : *found;
}

CUresult Captures::unsafe() {
  if (mode() == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  const auto forbids = [](const Capture& capture) {
    if (capture.thread() == std::this_thread::get_id()) {
      return capture.mode() != CU_STREAM_CAPTURE_MODE_RELAXED;
    }
    return mode() == CU_STREAM_CAPTURE_MODE_GLOBAL &&
           capture.mode() == CU_STREAM_CAPTURE_MODE_GLOBAL;
  };
  CUresult result = CUDA_SUCCESS;
  const std::lock_guard lock(mutex_);
  for (const CapturePtr& capture : active_) {
    if (!forbids(*capture)) continue;
    capture->invalidate();
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

}  // namespace kvxfer::cuda_double
