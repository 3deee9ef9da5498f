// Streams, events, copies and memory operations.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "driver.hpp"

namespace kvxfer::cuda_double {
namespace {

// Runs a queued copy: an address that has lost its memory meanwhile is illegal.
void copy(Context& context, CUdeviceptr to, CUdeviceptr from, std::size_t size) {
  Driver& driver = Driver::instance();
  const auto source = driver.memory.resolve(from, size, true);
  const auto target = driver.memory.resolve(to, size, true);
  if (source.bytes.empty() || target.bytes.empty() || !source.ready() || !target.ready()) {
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
  Place place;
  const CUresult bad =
      synchronous ? driver.place_for_wait(stream, &place) : driver.place(stream, &place);
  if (bad != CUDA_SUCCESS) return bad;
  if (size == 0) return CUDA_SUCCESS;
  const auto source = driver.memory.resolve(from, size, true);
  const auto target = driver.memory.resolve(to, size, true);
  if (source.bytes.empty() || target.bytes.empty()) return CUDA_ERROR_INVALID_VALUE;
  if (place.capture && (source.pageable || target.pageable)) {
    place.capture->invalidate();
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  place.await_room();
  Context& context = *place.context;
  // Pageable memory is read at once, and written before the call returns.
  std::function<void()> work = [&context, to, from, size] { copy(context, to, from, size); };
  if (source.pageable && !target.pageable) {
    std::vector<std::byte> staged(source.bytes[0].begin(), source.bytes[0].end());
    work = [&context, to, staged = std::move(staged)] {
      copy(context, to, reinterpret_cast<CUdeviceptr>(staged.data()), staged.size());
    };
  }
  const PointPtr end = place.enqueue(std::move(work));
  if (synchronous || target.pageable) driver.wait(end);
  return synchronous ? context.sticky.load() : CUDA_SUCCESS;
}

template <typename Word>
bool holds(Word found, Word value, unsigned int flags) {
  switch (flags & 0x3) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      return static_cast<std::make_signed_t<Word>>(found - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return found == value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (found & value) != 0;
    default:
      return static_cast<Word>(~(found | value)) != 0;
  }
}

// Returns a function that tries an operation on a word once, and returns true if it is done. A word
// that is gone poisons the context.
template <typename Word>
std::function<bool(Context&)> on_word(CUdeviceptr address,
                                      const std::function<bool(std::atomic_ref<Word>)>& operation) {
  const Memory& memory = Driver::instance().memory;
  const auto find = [&memory, address] { return memory.resolve(address, sizeof(Word), false); };
  if (address % sizeof(Word) != 0 || find().bytes.empty()) return nullptr;
  return [find, operation](Context& context) {
    const auto pieces = find();
    if (pieces.bytes.empty() || !pieces.ready()) {
      context.sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
      return true;
    }
    return operation(std::atomic_ref<Word>(*reinterpret_cast<Word*>(pieces.bytes[0].data())));
  };
}

template <typename Word>
std::function<bool(Context&)> write_word(CUdeviceptr address, Word value) {
  return on_word<Word>(address, [value](std::atomic_ref<Word> word) {
    word.store(value, std::memory_order_release);
    return true;
  });
}

template <typename Word>
std::function<bool(Context&)> wait_for_word(CUdeviceptr address, Word value, unsigned int flags) {
  return on_word<Word>(address, [value, flags](std::atomic_ref<Word> word) {
    return holds(word.load(std::memory_order_acquire), value, flags);
  });
}

// Queues operations as one piece of work, which runs them in order. Null is no valid operation.
CUresult memory_operations(CUstream stream, std::vector<std::function<bool(Context&)>> operations) {
  Place place;
  if (const CUresult bad = Driver::instance().place(stream, &place); bad != CUDA_SUCCESS) {
    return bad;
  }
  if (std::find(operations.begin(), operations.end(), nullptr) != operations.end()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  place.await_room();
  Context& context = *place.context;
  place.enqueue_until(
      [&context, operations = std::move(operations), next = std::size_t{0}]() mutable {
        while (next < operations.size() && operations[next](context)) ++next;
        return next == operations.size();
      });
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace kvxfer::cuda_double

using namespace kvxfer::cuda_double;

namespace {

CUdeviceptr address_of(const void* host) { return reinterpret_cast<CUdeviceptr>(host); }

}  // namespace

// --- streams ---------------------------------------------------------------------------------

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  Context* context = nullptr;
  if (const CUresult bad = Driver::instance().current(&context); bad != CUDA_SUCCESS) return bad;
  *least = 0;
  *greatest = Driver::kHighestPriority;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int priority) {
  Context* context = nullptr;
  Driver& driver = Driver::instance();
  if (const CUresult bad = driver.current(&context); bad != CUDA_SUCCESS) return bad;
  if (!stream || (flags & ~unsigned{CU_STREAM_NON_BLOCKING}) != 0) return CUDA_ERROR_INVALID_VALUE;
  return driver.make_stream(Driver::stack().back(), flags == CU_STREAM_DEFAULT, priority, stream);
}

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned int flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}

CUresult CUDAAPI cuStreamDestroy(CUstream stream) {
  return Driver::instance().destroy_stream(stream);
}

CUresult CUDAAPI cuStreamGetCtx(CUstream stream, CUcontext* context) {
  Place place;
  if (const CUresult bad = Driver::instance().place(stream, &place); bad != CUDA_SUCCESS) {
    return bad;
  }
  *context = place.stream->context();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamQuery(CUstream stream) {
  Place place;
  if (const CUresult bad = Driver::instance().place_for_wait(stream, &place); bad != CUDA_SUCCESS) {
    return bad;
  }
  return place.stream->last()->reached() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
  Driver& driver = Driver::instance();
  Place place;
  if (const CUresult bad = driver.place_for_wait(stream, &place); bad != CUDA_SUCCESS) return bad;
  driver.wait(place.stream->last());
  return place.context->sticky;
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  Place place;
  if (const CUresult bad = Driver::instance().place(stream, &place); bad != CUDA_SUCCESS) {
    return bad;
  }
  place.await_room();
  place.enqueue([function, data] { function(data); });
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
  Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  return driver.record(event, place);
}

CUresult CUDAAPI cuEventQuery(CUevent event) {
  PointPtr point;
  Driver& driver = Driver::instance();
  if (const CUresult bad = driver.captures.unsafe(); bad != CUDA_SUCCESS) return bad;
  if (const CUresult bad = driver.recorded(event, &point); bad != CUDA_SUCCESS) return bad;
  return !point || point->reached() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuEventSynchronize(CUevent event) {
  PointPtr point;
  Driver& driver = Driver::instance();
  if (const CUresult bad = driver.captures.unsafe(); bad != CUDA_SUCCESS) return bad;
  if (const CUresult bad = driver.recorded(event, &point); bad != CUDA_SUCCESS) return bad;
  if (point) driver.wait(point);
  return driver.recorded(event, &point);
}

// Waits for the event's last record before this call, not for later ones.
CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
  Driver& driver = Driver::instance();
  Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  place.await_room();
  return driver.wait_for(event, place);
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

CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) {
  return copy_on(nullptr, to, from, size, true);
}

// Runs the batch in the stream's order, and its copies in no order.
CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                    CUmemcpyAttributes* attributes, size_t* first_of,
                                    size_t attributes_count, CUstream stream) {
  Driver& driver = Driver::instance();
  if (stream == nullptr || stream == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
  Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  if (count == 0 || attributes_count == 0 || attributes_count > count || first_of[0] != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  struct Copy {
    CUdeviceptr to;
    CUdeviceptr from;
    std::size_t size;
    std::vector<std::byte> staged;  // if the source is read at once
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
    if (place.capture && (source.pageable || target.pageable)) {
      place.capture->invalidate();
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
  }
  place.await_room();
  static std::atomic<unsigned> seed = 1;
  std::shuffle(copies.begin(), copies.end(), std::minstd_rand(seed++));
  Context& context = *place.context;
  const PointPtr end = place.enqueue([&context, copies = std::move(copies)] {
    for (const Copy& each : copies) {
      const CUdeviceptr source = each.staged.empty() ? each.from : address_of(each.staged.data());
      copy(context, each.to, source, each.size);
    }
  });
  if (pageable) driver.wait(end);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size,
                                 CUstream stream) {
  Driver& driver = Driver::instance();
  Place place;
  if (const CUresult bad = driver.place(stream, &place); bad != CUDA_SUCCESS) return bad;
  if (driver.memory.resolve(to, size, false).bytes.empty()) return CUDA_ERROR_INVALID_VALUE;
  place.await_room();
  Context& context = *place.context;
  place.enqueue([&driver, &context, to, value, size] {
    const auto target = driver.memory.resolve(to, size, false);
    if (target.bytes.empty() || !target.ready()) context.sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
    for (const auto& piece : target.bytes) std::memset(piece.data(), value, piece.size());
  });
  return CUDA_SUCCESS;
}

// --- words -----------------------------------------------------------------------------------

CUresult CUDAAPI cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                      unsigned int) {
  return memory_operations(stream, {write_word<std::uint32_t>(address, value)});
}

CUresult CUDAAPI cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                      unsigned int) {
  return memory_operations(stream, {write_word<std::uint64_t>(address, value)});
}

CUresult CUDAAPI cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                     unsigned int flags) {
  return memory_operations(stream, {wait_for_word<std::uint32_t>(address, value, flags)});
}

CUresult CUDAAPI cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                     unsigned int flags) {
  return memory_operations(stream, {wait_for_word<std::uint64_t>(address, value, flags)});
}

CUresult CUDAAPI cuStreamBatchMemOp(CUstream stream, unsigned int count,
                                    CUstreamBatchMemOpParams* given, unsigned int flags) {
  if (count == 0 || count >= 256 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  std::vector<std::function<bool(Context&)>> operations;
  for (const auto& each : std::span(given, count)) {
    switch (each.operation) {
      case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        operations.push_back(wait_for_word<std::uint32_t>(
            each.waitValue.address, each.waitValue.value, each.waitValue.flags));
        break;
      case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        operations.push_back(wait_for_word<std::uint64_t>(
            each.waitValue.address, each.waitValue.value64, each.waitValue.flags));
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        operations.push_back(
            write_word<std::uint32_t>(each.writeValue.address, each.writeValue.value));
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        operations.push_back(
            write_word<std::uint64_t>(each.writeValue.address, each.writeValue.value64));
        break;
      default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return memory_operations(stream, std::move(operations));
}
