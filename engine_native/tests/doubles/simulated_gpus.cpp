#include "doubles/simulated_gpus.hpp"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "clock.hpp"

namespace kvxfer::test {

std::function<void()> during_flush;

namespace {

// The time after which unflushed bytes land.
constexpr std::uint64_t kUnflushedNs = 50'000'000;
// Longer than a real flush, so that writes arrive meanwhile.
constexpr std::chrono::microseconds kFlush{200};

// Finds a call of the double, if this process has loaded it.
template <class Call>
Call* find_in_cuda(const char* name) {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!library) return nullptr;
  auto* const found = reinterpret_cast<Call*>(::dlsym(library, name));
  ::dlclose(library);
  return found;
}

// Does not cover bytes that arrive while it runs: cuda.h promises nothing of writes after the call
// of cuFlushGPUDirectRDMAWrites.
void flush_begun() {
  const std::uint64_t began = now_ns();
  std::this_thread::sleep_for(kFlush);
  if (during_flush) during_flush();
  gpu_writes().flush(began + kUnflushedNs);
}

GpuMemory watched(GpuMemory memory) {
  const auto on_flush = find_in_cuda<void(void (*)())>("cuda_double_on_flush");
  if (on_flush) on_flush(flush_begun);
  return memory;
}

}  // namespace

GpuMemory gpu_memory_at(const void* address, std::size_t size) {
  const auto alias = find_in_cuda<void*(std::uint64_t, std::size_t)>("cuda_double_alias");
  void* const there = alias ? alias(reinterpret_cast<std::uint64_t>(address), size) : nullptr;
  if (!there || there == address) return {};
  return watched({.bytes = static_cast<std::byte*>(there)});
}

// A memfd whose file position is the offset of the memory.
GpuMemory gpu_memory_of(int dmabuf, std::uint64_t offset, std::size_t size) {
  const std::size_t all = offset + size;
  void* const mapped = ::mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_SHARED, dmabuf,
                              ::lseek(dmabuf, 0, SEEK_CUR));
  if (mapped == MAP_FAILED) return {};
  return watched({.bytes = static_cast<std::byte*>(mapped) + offset,
                  .mapping = {mapped, [all](void* start) { ::munmap(start, all); }}});
}

void GpuWrites::land(Landing landing) {
  if (landing.bytes.empty()) return;
  if (!landing.on_gpu) {
    std::memcpy(landing.at, landing.bytes.data(), landing.bytes.size());
    return;
  }
  const std::lock_guard lock(mutex_);
  unflushed_.push_back({std::move(landing), now_ns() + kUnflushedNs});
}

void GpuWrites::flush(std::uint64_t now) {
  const std::lock_guard lock(mutex_);
  for (; !unflushed_.empty() && unflushed_.front().until_ns <= now; unflushed_.pop_front()) {
    const Landing& landing = unflushed_.front().landing;
    std::memcpy(landing.at, landing.bytes.data(), landing.bytes.size());
  }
}

bool GpuWrites::empty() const {
  const std::lock_guard lock(mutex_);
  return unflushed_.empty();
}

GpuWrites& gpu_writes() {
  static GpuWrites& writes = *new GpuWrites;  // not freed: threads of networks use it to the end
  return writes;
}

}  // namespace kvxfer::test
