// Streams, events, copies and memory operations.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "driver.hpp"

namespace kvxfer::cuda_double {
namespace {

// What was queued runs later: an address that has lost its memory until then is an illegal one.
void copy(Context& context, CUdeviceptr to, CUdeviceptr from, std::size_t size) {
  Driver& driver = Driver::instance();
  const auto source = driver.memory.resolve(from, size, true);
  const auto target = driver.memory.resolve(to, size, true);
  if (source.bytes.empty() || target.bytes.empty()) {
    context.sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
    return;
  }
  auto read = source.bytes.begin();
  auto write = target.bytes.begin();
  auto unread = *read;
  auto unwritten = *write;
  for (std::size_t left = size; left > 0;) {
    const std::size_t length = std::min(unread.size(), unwritten.size());
    std::memmove(unwritten.data(), unread.data(), length);
    left -= length;
    unread = unread.subspan(length);
    unwritten = unwritten.subspan(length);
    if (left > 0 && unread.empty()) unread = *++read;
    if (left > 0 && unwritten.empty()) unwritten = *++write;
  }
}

CUresult copy_on(CUstream stream, CUdeviceptr to, CUdeviceptr from, std::size_t size,
                 bool synchronous) {
  Driver& driver = Driver::instance();
  Driver::Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  if (size == 0) return CUDA_SUCCESS;
  const auto source = driver.memory.resolve(from, size, true);
  const auto target = driver.memory.resolve(to, size, true);
  if (source.bytes.empty() || target.bytes.empty()) return CUDA_ERROR_INVALID_VALUE;
  Context& context = *place.context;
  // Pageable memory is read at once, and written before the call returns.
  std::function<void()> work = [&context, to, from, size] { copy(context, to, from, size); };
  if (source.pageable && !target.pageable) {
    std::vector<std::byte> staged(source.bytes[0].begin(), source.bytes[0].end());
    work = [&context, to, staged = std::move(staged)] {
      copy(context, to, reinterpret_cast<CUdeviceptr>(staged.data()), staged.size());
    };
  }
  const PointPtr end = place.stream->enqueue(std::move(work), std::move(place.after));
  if (synchronous || target.pageable) driver.wait(end);
  return synchronous ? context.sticky.load() : CUDA_SUCCESS;
}

std::atomic_ref<std::uint64_t> word_at(const Memory::Pieces& pieces) {
  return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(pieces.bytes[0].data()));
}

bool holds(std::uint64_t found, std::uint64_t value, unsigned int flags) {
  switch (flags & 0x3) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      return static_cast<std::int64_t>(found - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return found == value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (found & value) != 0;
    default:
      return ~(found | value) != 0;
  }
}

CUresult memory_operation(CUstream stream, CUdeviceptr address,
                          const std::function<bool(std::atomic_ref<std::uint64_t>)>& step) {
  Driver& driver = Driver::instance();
  Driver::Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  if (address % sizeof(std::uint64_t) != 0 ||
      driver.memory.resolve(address, sizeof(std::uint64_t), false).bytes.empty()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Context& context = *place.context;
  place.stream->enqueue_until(
      [&driver, &context, address, step] {
        const auto pieces = driver.memory.resolve(address, sizeof(std::uint64_t), false);
        if (pieces.bytes.empty()) {
          context.sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
          return true;
        }
        return step(word_at(pieces));
      },
      std::move(place.after));
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace kvxfer::cuda_double

using namespace kvxfer::cuda_double;

namespace {

CUdeviceptr address_of(const void* host) { return reinterpret_cast<CUdeviceptr>(host); }

}  // namespace

// --- streams ---------------------------------------------------------------------------------

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int) {
  Context* context = nullptr;
  Driver& driver = Driver::instance();
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  if (!stream || (flags & ~CU_STREAM_NON_BLOCKING) != 0) return CUDA_ERROR_INVALID_VALUE;
  return driver.make_stream(Driver::stack().back(), flags == CU_STREAM_DEFAULT, stream);
}

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned int flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}

CUresult CUDAAPI cuStreamDestroy(CUstream stream) {
  return Driver::instance().destroy_stream(stream);
}

CUresult CUDAAPI cuStreamGetCtx(CUstream stream, CUcontext* context) {
  Driver::Place place;
  if (const CUresult bad = Driver::instance().place(stream, &place); bad != CUDA_SUCCESS) {
    return bad;
  }
  *context = place.stream->context();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamQuery(CUstream stream) {
  Driver::Place place;
  if (const CUresult bad = Driver::instance().place(stream, &place); bad != CUDA_SUCCESS) {
    return bad;
  }
  return place.stream->last()->reached() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
  Driver& driver = Driver::instance();
  Driver::Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  driver.wait(place.stream->last());
  return place.context->sticky;
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  Driver::Place place;
  if (const CUresult bad = Driver::instance().place(stream, &place); bad != CUDA_SUCCESS) {
    return bad;
  }
  place.stream->enqueue([function, data] { function(data); }, std::move(place.after));
  return CUDA_SUCCESS;
}

// --- events ----------------------------------------------------------------------------------

CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned int) {
  Context* context = nullptr;
  Driver& driver = Driver::instance();
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  if (!event) return CUDA_ERROR_INVALID_VALUE;
  *event = driver.make_event(Driver::stack().back());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventDestroy(CUevent event) { return Driver::instance().destroy_event(event); }

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
  Driver& driver = Driver::instance();
  Driver::Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  return driver.record(event, place.stream->context(), place.stream->last());
}

CUresult CUDAAPI cuEventQuery(CUevent event) {
  PointPtr point;
  if (const CUresult bad = Driver::instance().recorded(event, &point); bad != CUDA_SUCCESS) {
    return bad;
  }
  return !point || point->reached() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuEventSynchronize(CUevent event) {
  PointPtr point;
  Driver& driver = Driver::instance();
  if (const CUresult bad = driver.recorded(event, &point); bad != CUDA_SUCCESS) return bad;
  if (point) driver.wait(point);
  return CUDA_SUCCESS;
}

// For what the event stands for now, whatever it is recorded for later.
CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
  Driver& driver = Driver::instance();
  Driver::Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  PointPtr point;
  if (const CUresult bad = driver.recorded(event, &point); bad != CUDA_SUCCESS) return bad;
  if (!point) return CUDA_SUCCESS;
  place.after.push_back(std::move(point));
  place.stream->enqueue([] {}, std::move(place.after));
  return CUDA_SUCCESS;
}

// --- copies ----------------------------------------------------------------------------------

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  return copy_on(stream, to, from, size, false);
}

CUresult CUDAAPI cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
  return copy_on(nullptr, to, from, size, true);
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t size, CUstream stream) {
  return copy_on(stream, to, address_of(from), size, false);
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t size, CUstream stream) {
  return copy_on(stream, address_of(to), from, size, false);
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  return copy_on(stream, to, from, size, false);
}

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t size) {
  return copy_on(nullptr, to, address_of(from), size, true);
}

CUresult CUDAAPI cuMemcpyDtoH(void* to, CUdeviceptr from, size_t size) {
  return copy_on(nullptr, address_of(to), from, size, true);
}

// In the stream's order as a whole, and within it in none.
CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                    CUmemcpyAttributes* attributes, size_t* first_of,
                                    size_t attributes_count, CUstream stream) {
  Driver& driver = Driver::instance();
  if (stream == nullptr || stream == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
  Driver::Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  if (count == 0 || attributes_count == 0 || attributes_count > count || first_of[0] != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  struct Copy {
    CUdeviceptr to;
    CUdeviceptr from;
    std::size_t size;
    std::vector<std::byte> staged;  // where the source is read at once
  };
  std::vector<Copy> copies;
  bool pageable = false;
  for (std::size_t i = 0, attribute = 0; i < count; ++i) {
    if (attribute + 1 < attributes_count && first_of[attribute + 1] <= i) {
      if (first_of[++attribute] != i) return CUDA_ERROR_INVALID_VALUE;
    }
    const auto source = driver.memory.resolve(from[i], sizes[i], true);
    const auto target = driver.memory.resolve(to[i], sizes[i], true);
    if (source.bytes.empty() || target.bytes.empty()) return CUDA_ERROR_INVALID_VALUE;
    Copy& copy = copies.emplace_back(Copy{to[i], from[i], sizes[i], {}});
    switch (attributes[attribute].srcAccessOrder) {
      case CU_MEMCPY_SRC_ACCESS_ORDER_STREAM:
        break;
      case CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL:
      case CU_MEMCPY_SRC_ACCESS_ORDER_ANY:
        for (const auto& piece : source.bytes) {
          copy.staged.insert(copy.staged.end(), piece.begin(), piece.end());
        }
        break;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    pageable = pageable || target.pageable;
  }
  static std::atomic<unsigned> seed = 1;
  std::shuffle(copies.begin(), copies.end(), std::minstd_rand(seed++));
  Context& context = *place.context;
  const PointPtr end = place.stream->enqueue(
      [&context, copies = std::move(copies)] {
        for (const Copy& each : copies) {
          const CUdeviceptr source =
              each.staged.empty() ? each.from : address_of(each.staged.data());
          copy(context, each.to, source, each.size);
        }
      },
      std::move(place.after));
  if (pageable) driver.wait(end);
  return CUDA_SUCCESS;
}

// --- words -----------------------------------------------------------------------------------

CUresult CUDAAPI cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                      unsigned int) {
  return memory_operation(stream, address, [value](std::atomic_ref<std::uint64_t> word) {
    word.store(value, std::memory_order_release);
    return true;
  });
}

CUresult CUDAAPI cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                     unsigned int flags) {
  return memory_operation(stream, address, [value, flags](std::atomic_ref<std::uint64_t> word) {
    return holds(word.load(std::memory_order_acquire), value, flags);
  });
}
