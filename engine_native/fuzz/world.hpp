// The surroundings of an engine's path, and memory that shows which bytes were written.
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

// A GPU of the double (cuda_double.hpp), and memory of it. Opened once, because that takes longer
// than anything else.
struct Device {
  static Device& only();
  static void close();  // if it is open

  cuda::Gpus gpus;
  std::shared_ptr<cuda::Gpu> gpu;
  RegionPtr memory;  // memory of the world
  RegionPtr source;  // memory to send from
};

// Memory of the engine under test, on the host or on a GPU. The peer may write to `open`, and with
// `granted_imm` to `granted` until release(); never to anything else, nor with the counter of
// another peer.
class World {
 public:
  enum class Place : std::uint8_t { host, gpu };
  explicit World(Place place = Place::host);
  ~World();

  bool on_gpu() const { return place_ == Place::gpu; }
  cuda::Gpus& gpus() { return on_gpu() ? Device::only().gpus : none_; }
  // Waits until nothing is under way at a GPU.
  void wait_for_copies();
  ReceiveContext receive_context() { return {regions, *counters, stats, activity, gpus()}; }
  // Returns one of the keys that a peer might name, or any.
  std::uint64_t key(Input& input) const;
  Imm imm(Input& input) const;
  // Returns an operation of ours that writes to a region of the peer, out of `source`, which may be
  // null.
  OperationPtr operation(Input& input, RegionPtr source, std::uint64_t key) const;
  // Releases the counter of `granted`; `tell` informs the paths. From then on nothing may change
  // there.
  void release(const std::function<void()>& tell);
  bool released() const { return released_.has_value(); }
  // Does the same with `open`, which is deregistered.
  void deregister(const std::function<void()>& tell);
  bool deregistered() const { return deregistered_.has_value(); }
  // Aborts if a byte has changed that no writer was allowed to write.
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
  std::size_t mapped_ = 0;  // allocations on the GPU before the run
  RegionPtr pool_;
  std::optional<Bytes> released_;      // all bytes at release()
  std::optional<Bytes> deregistered_;  // all bytes at deregister()
};

// The receiver of a path's reports: checks the accounts of the operations that are posted on it.
class Books final : public PathEvents {
 public:
  void on_finished(const OperationPtr& operation, const WriteRange& writes,
                   const Error& error) override;
  void on_lost(Path&, Error) override { lost = true; }

  bool lost = false;
};

}  // namespace kvxfer::fuzz
