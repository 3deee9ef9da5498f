#include "fabric/local/gpu_sources.hpp"

#include <string>
#include <utility>

namespace kvxfer::local {
namespace {

constexpr std::size_t kMaxGpuRegions = 8192;  // of one peer

}  // namespace

GpuSources::~GpuSources() {
  for (auto& [number, region] : regions_) close(std::move(region.memory));
}

void GpuSources::add(const GpuRegionMessage& message, bool same_process, Opened then) {
  const std::uint32_t number = message.head.number;
  if (regions_.size() >= kMaxGpuRegions) {
    return then(number, Error{Errc::backpressure, "more than " + std::to_string(kMaxGpuRegions) +
                                                      " memory regions of GPUs are open"});
  }
  regions_[number];
  context_.background.run<Result<Region>>(
      [&gpus = context_.gpus, message, same_process] { return open(gpus, message, same_process); },
      [this, number, then = std::move(then), self = std::weak_ptr(self_)](Result<Region> opened) {
        if (self.expired()) return;  // closed with what has opened it
        const auto region = regions_.find(number);
        if (region == regions_.end()) return;  // removed meanwhile: likewise
        if (!opened) {
          regions_.erase(region);
          return then(number, opened.error());
        }
        region->second = std::move(*opened);
        then(number, region->second.gpu->device());
      });
}

Result<GpuSources::Region> GpuSources::open(cuda::Gpus& gpus, const GpuRegionMessage& message,
                                            bool same_process) {
  auto gpu = gpus.open(message.gpu);
  if (!gpu) return gpu.error();
  Region region{.gpu = std::move(*gpu),
                .memory = nullptr,
                .address = message.address,
                .size = message.head.size};
  if (same_process) return region;
  auto memory = region.gpu->import(message.handle);
  if (!memory) return memory.error();
  region.memory = std::move(*memory);
  region.address = region.memory->base() + message.offset;
  if (!region.gpu->holds(region.address, region.size)) {
    return Error{Errc::out_of_bounds, "the peer's region leaves the allocation of its handle"};
  }
  return region;
}

void GpuSources::remove(std::uint32_t number) {
  const auto found = regions_.extract(number);
  if (found) close(std::move(found.mapped().memory));
}

void GpuSources::close(std::shared_ptr<cuda::ImportedMemory> memory) {
  if (!memory) return;
  context_.gpus.after_copies(
      [&background = context_.background, memory = std::move(memory)]() mutable {
        background.run([last = std::exchange(memory, nullptr)]() mutable { last.reset(); }, [] {});
      });
}

std::uint64_t GpuSources::in_region(std::uint32_t number, std::uint64_t offset,
                                    std::uint32_t length, const cuda::Gpu& gpu) const {
  const auto found = regions_.find(number);
  if (found == regions_.end()) return 0;
  const Region& region = found->second;
  if (region.gpu.get() != &gpu || offset > region.size || length > region.size - offset) return 0;
  return region.address + offset;
}

}  // namespace kvxfer::local
