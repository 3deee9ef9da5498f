// The sender's GPU memory, which the receiver opens. Opening and closing a handle and reading a
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

// The objects that open and lend memory of GPUs, and report notices.
struct GpuContext {
  cuda::Gpus& gpus;
  Background& background;
  LentMemory& lent;
  std::function<void(std::string notice)> tell;
};

class GpuSources {
 public:
  // `closed` is called when no GPU of ours has a removed region open any more. `open` is held while
  // a GPU may have anything open.
  using Closed = std::function<void(std::uint32_t number)>;
  GpuSources(GpuContext context, std::shared_ptr<void> open, Closed closed)
      : context_(std::move(context)), open_(std::move(open)), closed_(std::move(closed)) {}
  ~GpuSources();
  GpuSources(const GpuSources&) = delete;
  GpuSources& operator=(const GpuSources&) = delete;

  // Opens a region for its reading GPU. `then` gets the result; it is called instead of `closed` if
  // the region was removed meanwhile, and not at all once this is destroyed. `same_process`: the
  // region's address is valid here. Fails if the peer breaks the protocol.
  using Opened = std::function<void(std::uint32_t number, Result<void> opened)>;
  Result<void> add(const GpuRegionMessage& message, cuda::FileParts files, bool same_process,
                   Opened then);
  // True if the reading GPU may open the region: memory of that GPU, or of one whose probe it has
  // read.
  bool tried(const GpuRegionMessage& message) const;
  // Reads a probe, for tried(). `then` gets whether its bytes are right.
  Result<void> probe(const GpuRegionMessage& message, cuda::FileParts files, Opened then);
  // Removes a region, and closes it after the copies that read it now.
  void remove(std::uint32_t number);
  bool has(std::uint32_t number) const { return regions_.contains(number); }

  // Returns the address of this part of the region for that GPU; 0 if the part leaves the region,
  // or the region is for another GPU.
  std::uint64_t in_region(std::uint32_t number, std::uint64_t offset, std::uint32_t length,
                          const cuda::Gpu& gpu) const;

 private:
  struct Region {
    std::shared_ptr<cuda::Gpu> gpu;  // reads the region; null while it is being opened
    std::shared_ptr<cuda::ImportedMemory> memory;  // null within one process
    std::uint64_t address = 0;
    std::uint64_t size = 0;
    std::uint64_t opening = 0;  // unique number of the opening
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
  std::set<std::pair<cuda::Uuid, std::uint64_t>> tried_;  // owner of a probe, reader
  std::uint64_t last_opening_ = 0;
  std::size_t under_way_ = 0;
  std::size_t with_files_ = 0;  // part of under_way_
  std::shared_ptr<GpuSources*> self_ = std::make_shared<GpuSources*>(this);
};

}  // namespace kvxfer::local
