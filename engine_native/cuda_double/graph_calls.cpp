// Capture and graphs.
#include <memory>
#include <utility>

#include "driver.hpp"

using namespace kvxfer::cuda_double;

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (!mode || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, Captures::mode());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  Driver& driver = Driver::instance();
  Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  if (mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  if (place.stream == place.context->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return driver.captures.begin(*place.stream, mode);
}

CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  Driver& driver = Driver::instance();
  Place place;
  const CUresult found = driver.place(stream, &place);
  if (found != CUDA_SUCCESS && found != CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) return found;
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  *graph = nullptr;
  std::unique_ptr<Graph> captured;
  if (const CUresult bad = driver.captures.end(*place.stream, &captured); bad != CUDA_SUCCESS) {
    return bad;
  }
  *graph = driver.keep_graph(std::move(captured));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  if (!status) return CUDA_ERROR_INVALID_VALUE;
  if (stream == nullptr || stream == CU_STREAM_LEGACY) return CUDA_ERROR_NOT_SUPPORTED;
  Place place;
  switch (const CUresult found = Driver::instance().place(stream, &place); found) {
    case CUDA_SUCCESS:
      *status = place.capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
      return CUDA_SUCCESS;
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
      *status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
      return CUDA_SUCCESS;
    default:
      return found;
  }
}

CUresult CUDAAPI cuGraphInstantiate(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  return flags == 0 ? Driver::instance().instantiate(graph, exec) : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  Driver& driver = Driver::instance();
  Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  place.await_room();
  return driver.launch(exec, place);
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec exec) {
  return Driver::instance().destroy_exec(exec);
}

CUresult CUDAAPI cuGraphDestroy(CUgraph graph) { return Driver::instance().destroy_graph(graph); }
