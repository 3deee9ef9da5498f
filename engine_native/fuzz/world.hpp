// What surrounds a path of an engine, and memory that shows what was written where.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "completion_queue.hpp"
#include "cuda/gpus.hpp"
#include "domain.hpp"
#include "imm_counter.hpp"
#include "input.hpp"
#include "memory_region.hpp"
#include "poller.hpp"

namespace kvxfer::fuzz {

inline constexpr PeerId kPeer = 1;
inline constexpr PeerId kStranger = 2;

// A GPU of the double (cuda_double.hpp), and memory of it. Opened once, which takes longer than
// anything else.
struct Device {
  static Device& only();
  static void close();  // if it is open

  cuda::Gpus gpus;
  std::shared_ptr<cuda::Gpu> gpu;
  RegionPtr memory;  // that a world is in
  RegionPtr source;  // to send from
};

// Memory of the engine under test, of the host or of a GPU. The peer may write to `open`, and with
// `granted_imm` to `granted` until release(); never to anything else, nor with the counter of
// another peer.
class World {
 public:
  enum class Place : std::uint8_t { host, gpu };
  explicit World(Place place = Place::host);
  ~World();

  bool on_gpu() const { return place_ == Place::gpu; }
  cuda::Gpus& gpus() { return on_gpu() ? Device::only().gpus : none_; }
  // Until nothing is under way at a GPU any more.
  void wait_for_copies();
  ReceiveContext receive_context() { return {regions, *counters, stats, activity, gpus()}; }
  // One of the keys that a peer might name, or any.
  std::uint64_t key(Input& input) const;
  Imm imm(Input& input) const;
  // A write of ours to a region of the peer, out of `source`, which may be null.
  OperationPtr operation(Input& input, RegionPtr source, std::uint64_t key) const;
  // Of `granted`: `tell` tells the paths. From here on nothing may change there.
  void release(const std::function<void()>& tell);
  bool released() const { return released_.has_value(); }
  // The same with `open`.
  void deregister(const std::function<void()>& tell);
  bool deregistered() const { return deregistered_.has_value(); }
  // Aborts where a byte has changed that no writer was allowed to write.
  void check() const;

  std::unique_ptr<CompletionQueue> completions;
  std::unique_ptr<ImmCounters> counters;
  RegionTable regions;
  EngineStats stats;
  std::uint64_t activity = 0;
  Poller poller;

  RegionPtr open;
  RegionPtr granted;
  RegionPtr of_stranger;
  Imm open_imm = 0;
  Imm granted_imm = 0;
  Imm stranger_imm = 0;

 private:
  static constexpr std::size_t kRegion = 4096;
  static constexpr std::size_t kGuard = 1024;
  static constexpr std::byte kUntouched{0xa5};
  using Bytes = std::vector<std::byte>;

  // guard, open, guard, granted, guard, of_stranger, guard
  static constexpr std::size_t kStep = kGuard + kRegion;
  static constexpr std::size_t kAll = 3 * kStep + kGuard;
  std::byte* at(std::size_t region) const {
    return reinterpret_cast<std::byte*>(memory_->address()) + region * kStep + kGuard;
  }
  RegionPtr wrap(std::byte* address, std::size_t size) const;
  Bytes all() const;
  static std::span<const std::byte> part(const Bytes& all, std::size_t region) {
    return std::span(all).subspan(region * kStep + kGuard, kRegion);
  }

  Place place_;
  cuda::Gpus none_;
  Bytes on_host_;
  RegionPtr memory_;
  std::size_t mapped_ = 0;  // of the GPU's memory, before
  RegionPtr pool_;
  std::optional<Bytes> released_;      // all, as it was then
  std::optional<Bytes> deregistered_;  // the same
};

// What a path reports: checks the books of the operations that are posted on it.
class Books final : public PathEvents {
 public:
  void on_finished(const OperationPtr& operation, const WriteRange& writes,
                   const Error& error) override;
  void on_lost(Path&, Error) override { lost = true; }

  bool lost = false;
};

}  // namespace kvxfer::fuzz
