#include "fabric/local/gpu_sources.hpp"

#include <string>
#include <utility>

#include "fabric/local/gpu_probe.hpp"

namespace kvxfer::local {
namespace {

// Regions and probes that are being opened for one peer, at most.
constexpr std::size_t kMaxOpening = 64;
constexpr std::size_t kMaxWithFiles = 2;

// Finds the reading GPU. The peer knows its number from a region of ours that lies there.
Result<std::shared_ptr<cuda::Gpu>> reader_of(const cuda::Gpus& gpus,
                                             const GpuRegionMessage& message) {
  if (auto gpu = gpus.find(static_cast<int>(message.reader))) return gpu;
  return Error{Errc::invalid_argument,
               "this engine has no memory of GPU " + std::to_string(message.reader)};
}

// Closes memory in the background, because closing may wait for streams that wait for the engine
// thread.
void close_on(Background& background, std::shared_ptr<cuda::ImportedMemory> memory,
              std::function<void()> then) {
  if (!memory) return then();
  background.run([last = std::move(memory)]() mutable { last.reset(); }, std::move(then));
}

}  // namespace

GpuSources::~GpuSources() {
  for (auto& [number, region] : regions_) close(std::move(region.memory), [open = open_] {});
}

bool GpuSources::full(std::size_t with_files) const {
  return under_way_ >= kMaxOpening || with_files_ + with_files > kMaxWithFiles;
}

Result<void> GpuSources::add(const GpuRegionMessage& message, cuda::FileParts files,
                             bool same_process, Opened then) {
  thread_.check("GpuSources");
  const std::uint32_t number = message.head.number;
  const std::size_t with_files = files.parts.empty() ? 0 : 1;
  if (regions_.contains(number) || regions_.size() >= kMostGpuRegions || full(with_files)) {
    return Error{Errc::protocol_error, "the peer shares a region of a GPU twice, or too many"};
  }
  const std::uint64_t opening = ++last_opening_;
  ++under_way_;
  with_files_ += with_files;
  regions_[number].opening = opening;
  context_.background.run<Result<Region>>(
      [&gpus = context_.gpus, message, same_process,
       files = std::make_shared<cuda::FileParts>(std::move(files))] {
        return open(gpus, message, *files, same_process);
      },
      [this, number, opening, with_files, then = std::move(then), &background = context_.background,
       open = open_, self = std::weak_ptr(self_)](Result<Region> opened) {
        if (self.expired()) {
          if (opened) close_on(background, std::move(opened->memory), [open] {});
          return;
        }
        --under_way_;
        with_files_ -= with_files;
        const auto region = regions_.find(number);
        if (region == regions_.end() || region->second.opening != opening) {
          close_on(background, opened ? std::move(opened->memory) : nullptr, [number, then, self] {
            if (self.expired()) return;
            then(number, Error{Errc::unknown_region, "it was taken back meanwhile"});
          });
          return;
        }
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
  auto gpu = reader_of(gpus, message);
  if (!gpu) return gpu.error();
  Region region{.gpu = std::move(*gpu),
                .memory = nullptr,
                .address = message.address,
                .size = message.head.size};
  const bool by_files = !files.parts.empty();
  if (same_process && !by_files) return region;
  auto memory = by_files ? region.gpu->import(files) : region.gpu->import(message.handle);
  if (!memory) return memory.error();
  region.memory = std::move(*memory);
  region.address = region.memory->base() + message.offset;
  if (!region.memory->holds(message.offset, region.size)) {
    return Error{Errc::out_of_bounds, "the peer's region leaves the memory that it shares"};
  }
  return region;
}

bool GpuSources::tried(const GpuRegionMessage& message) const {
  const auto reader = reader_of(context_.gpus, message);
  return !reader || (*reader)->uuid() == message.owner ||
         tried_.contains({message.owner, message.reader});
}

Result<void> GpuSources::probe(const GpuRegionMessage& message, cuda::FileParts files,
                               Opened then) {
  thread_.check("GpuSources");
  if (files.parts.size() != 1 || tried_.size() >= kMostGpuRegions || full(1)) {
    return Error{Errc::protocol_error, "a probe of the peer's has no file, or there are too many"};
  }
  ++under_way_;
  ++with_files_;
  context_.background.run<Result<void>>(
      [&gpus = context_.gpus, message,
       files = std::make_shared<cuda::FileParts>(std::move(files))]() -> Result<void> {
        const auto reader = reader_of(gpus, message);
        return reader ? read_probe(**reader, *files, message.seed) : reader.error();
      },
      [this, message, then = std::move(then),
       self = std::weak_ptr(self_)](const Result<void>& read) {
        if (self.expired()) return;
        --under_way_;
        --with_files_;
        if (read) tried_.emplace(message.owner, message.reader);
        then(message.head.number, read);
      });
  return {};
}

void GpuSources::remove(std::uint32_t number) {
  thread_.check("GpuSources");
  const auto found = regions_.extract(number);
  if (!found || !found.mapped().gpu) return;
  close(std::move(found.mapped().memory), [this, number, self = std::weak_ptr(self_)] {
    if (!self.expired()) closed_(number);
  });
}

void GpuSources::close(std::shared_ptr<cuda::ImportedMemory> memory, std::function<void()> then) {
  context_.gpus.after_copies([&background = context_.background, memory = std::move(memory),
                              then = std::move(then)]() mutable {
    close_on(background, std::exchange(memory, nullptr), std::move(then));
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
