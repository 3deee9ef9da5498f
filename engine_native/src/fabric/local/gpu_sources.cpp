#include "fabric/local/gpu_sources.hpp"

#include <string>
#include <utility>

namespace kvxfer::local {
namespace {

// Of one peer.
constexpr std::size_t kMaxGpuRegions = 8192;
constexpr std::size_t kMaxOpening = 64;

}  // namespace

GpuSources::~GpuSources() {
  for (auto& [number, region] : regions_) close(std::move(region.memory));
}

Result<void> GpuSources::add(const GpuRegionMessage& message, cuda::FileParts files,
                             bool same_process, Opened then) {
  const std::uint32_t number = message.head.number;
  if (regions_.contains(number) || regions_.size() >= kMaxGpuRegions || under_way_ >= kMaxOpening) {
    return Error{Errc::protocol_error, "the peer shares a region of a GPU twice, or too many"};
  }
  const std::uint64_t opening = ++last_opening_;
  ++under_way_;
  regions_[number].opening = opening;
  context_.background.run<Result<Region>>(
      [&gpus = context_.gpus, message, same_process,
       files = std::make_shared<cuda::FileParts>(std::move(files))] {
        return open(gpus, message, *files, same_process);
      },
      [this, number, opening, then = std::move(then),
       self = std::weak_ptr(self_)](Result<Region> opened) {
        if (self.expired()) return;  // closed with what has opened it
        --under_way_;
        const auto region = regions_.find(number);
        // Removed meanwhile: likewise.
        if (region == regions_.end() || region->second.opening != opening) return;
        if (!opened) {
          regions_.erase(region);
          return then(number, opened.error());
        }
        region->second = std::move(*opened);
        region->second.opening = opening;
        then(number, {});
      });
  return {};
}

Result<GpuSources::Region> GpuSources::open(cuda::Gpus& gpus, const GpuRegionMessage& message,
                                            const cuda::FileParts& files, bool same_process) {
  // A peer knows its number from a region that lies there.
  auto gpu = gpus.find(static_cast<int>(message.reader));
  if (!gpu) {
    return Error{Errc::invalid_argument,
                 "this engine has no memory of GPU " + std::to_string(message.reader)};
  }
  Region region{.gpu = std::move(gpu),
                .memory = nullptr,
                .address = message.address,
                .size = message.head.size};
  const bool by_files = !files.parts.empty();
  if (same_process && !by_files) {
    if (auto good = region.gpu->reach(static_cast<int>(message.device)); !good) {
      return good.error();
    }
    return region;
  }
  auto memory = by_files ? region.gpu->import(files) : region.gpu->import(message.handle);
  if (!memory) return memory.error();
  region.memory = std::move(*memory);
  region.address = region.memory->base() + message.offset;
  if (!region.memory->holds(message.offset, region.size)) {
    return Error{Errc::out_of_bounds, "the peer's region leaves what it shares"};
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
