// The sender's GPU memory as its receiver reaches it. Opening and closing a handle and reading a
// probe may take long, so they happen in the background. Engine thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "background.hpp"
#include "cuda/gpus.hpp"
#include "fabric/local/region_message.hpp"
#include "kvxfer/error.hpp"
#include "thread_owner.hpp"

namespace kvxfer::local {

class LentMemory;

// What opens memory of a GPU.
struct GpuContext {
  cuda::Gpus& gpus;
  Background& background;
  LentMemory& lent;
  std::function<void(std::string notice)> tell;
};

class GpuSources {
 public:
  // `closed`: of what was removed, no GPU of ours has it open any more. `open` is held for as long
  // as one may have anything open.
  using Closed = std::function<void(std::uint32_t number)>;
  GpuSources(GpuContext context, std::shared_ptr<void> open, Closed closed)
      : context_(std::move(context)), open_(std::move(open)), closed_(std::move(closed)) {}
  ~GpuSources();
  GpuSources(const GpuSources&) = delete;
  GpuSources& operator=(const GpuSources&) = delete;

  // `then`: whether the reading GPU reaches it; instead of `closed` where it was removed meanwhile;
  // not at all once this is destroyed. `same_process`: its address is valid here.
  // Fails where the peer breaks the protocol.
  using Opened = std::function<void(std::uint32_t number, Result<void> opened)>;
  Result<void> add(const GpuRegionMessage& message, cuda::FileParts files, bool same_process,
                   Opened then);
  // Whether the reading GPU may open it: its own memory, or that of a GPU whose probe it has read.
  bool tried(const GpuRegionMessage& message) const;
  // Reads a probe, for tried(). `then`: whether its bytes are right.
  Result<void> probe(const GpuRegionMessage& message, cuda::FileParts files, Opened then);
  // After the copies that read it now.
  void remove(std::uint32_t number);
  bool has(std::uint32_t number) const { return regions_.contains(number); }

  // Where that GPU finds this part of the region; 0 if it leaves it, or is for another GPU.
  std::uint64_t in_region(std::uint32_t number, std::uint64_t offset, std::uint32_t length,
                          const cuda::Gpu& gpu) const;

 private:
  struct Region {
    std::shared_ptr<cuda::Gpu> gpu;                // that reads it; null while it is being opened
    std::shared_ptr<cuda::ImportedMemory> memory;  // null within one process
    std::uint64_t address = 0;
    std::uint64_t size = 0;
    std::uint64_t opening = 0;  // which of all
  };

  static Result<Region> open(cuda::Gpus& gpus, const GpuRegionMessage& message,
                             const cuda::FileParts& files, bool same_process);
  bool full(std::size_t with_files) const;
  void close(std::shared_ptr<cuda::ImportedMemory> memory, std::function<void()> then);

  [[no_unique_address]] ThreadOwner thread_;
  GpuContext context_;
  std::shared_ptr<void> open_;
  Closed closed_;
  std::unordered_map<std::uint32_t, Region> regions_;
  std::set<std::pair<cuda::Uuid, std::uint64_t>> tried_;  // whose probes which of our GPUs has read
  std::uint64_t last_opening_ = 0;
  std::size_t under_way_ = 0;
  std::size_t with_files_ = 0;  // of them
  std::shared_ptr<GpuSources*> self_ = std::make_shared<GpuSources*>(this);
};

}  // namespace kvxfer::local
