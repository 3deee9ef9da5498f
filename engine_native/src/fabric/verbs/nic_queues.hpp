// A completion queue and a receive queue of a NIC, and the paths that share them. Engine thread
// only.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "fabric/verbs/path_budget.hpp"
#include "fabric/verbs/receive_queue.hpp"
#include "fabric/verbs/verbs_device.hpp"
#include "poller.hpp"
#include "thread_owner.hpp"

namespace kvxfer::verbs {

class VerbsPath;
struct VerbsNic;

class NicQueues final : private EventSink {
 public:
  // Creates the queues; call watch() next. Any thread.
  static Result<std::unique_ptr<NicQueues>> create(std::shared_ptr<const VerbsDevice> device,
                                                   std::uint64_t bits_per_second, Poller& poller);
  // Lets completions wake the engine.
  Result<void> watch();
  ~NicQueues();
  NicQueues(const NicQueues&) = delete;
  NicQueues& operator=(const NicQueues&) = delete;

  ibv_cq* completions() const { return queue_; }
  ibv_srq* receives() const { return receives_->get(); }
  void on_receives_low() { receives_->on_limit_reached(); }

  // --- shares of the queues
  struct Share {
    NicQueues* of;
    PathShare share;
  };
  // Calls `then` with a share of the NIC's first queues that have room. If none has, makes new
  // queues in the background and calls `then` later.
  using Taken = std::function<void(Result<Share>)>;
  static void take_share(VerbsNic& nic, Taken then);
  void give_back(const PathShare& share);

  // --- paths by queue pair number
  void add(std::uint32_t queue_pair, VerbsPath& path) { paths_[queue_pair] = &path; }
  void remove(std::uint32_t queue_pair, const VerbsPath& path) {
    if (find(queue_pair) == &path) paths_.erase(queue_pair);
  }
  VerbsPath* find(std::uint32_t queue_pair) const;
  const std::unordered_map<std::uint32_t, VerbsPath*>& paths() const { return paths_; }

  // --- completions
  // Passes some completions to their paths. Returns their number.
  std::size_t poll();
  // Passes on all completions that the queue held at the call.
  void drain();
  // Lets the next completion wake the engine. Returns false if there are completions already.
  bool arm();

  // Requests that a path fills in, then posts in one call. All paths share them, so that they stay
  // in cache.
  static constexpr std::size_t kMaxChain = 64;
  std::array<ibv_send_wr, kMaxChain> chain{};
  std::array<ibv_sge, kMaxChain> pieces{};

 private:
  NicQueues(std::shared_ptr<const VerbsDevice> device, Poller& poller)
      : device_(std::move(device)), poller_(poller) {}
  std::optional<PathShare> take_share();
  void on_events(std::uint32_t events) override;
  void acknowledge();

  static constexpr std::size_t kBatch = 64;

  [[no_unique_address]] ThreadOwner thread_;
  std::shared_ptr<const VerbsDevice> device_;
  Poller& poller_;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* queue_ = nullptr;
  std::unique_ptr<ReceiveQueue> receives_;
  PathBudget budget_{0, 0, 0};
  std::unordered_map<std::uint32_t, VerbsPath*> paths_;  // owned by their links
  bool armed_ = false;
  unsigned unacknowledged_ = 0;
};

}  // namespace kvxfer::verbs
