// What is known of one peer's memory regions, as their writer needs it: asked for by key, or told
// unasked where the peer grants them to this engine. Engine thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "bootstrap/bytes.hpp"
#include "fabric/nic/remote_region.hpp"
#include "kvxfer/error.hpp"
#include "operation.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class NicLinkOwner;

class RemoteRegions {
 public:
  RemoteRegions(PeerId peer, std::string label, NicLinkOwner& owner, OperationBook& operations)
      : peer_(peer), label_(std::move(label)), owner_(owner), operations_(operations) {}

  // Queues the operation once its destination is known, and its windows are open on all paths that
  // there are: what goes out before would all take the first.
  void resolve(const OperationPtr& operation);
  // So many paths are open.
  void set_paths(std::size_t paths);
  void forget(std::uint64_t key);
  // Those that were granted for the immediate.
  void forget_granted(Imm imm);
  // Lost, perhaps for what was known of regions without windows: those are asked for again.
  void forget_path(PathId path);

  // False if the frame is malformed.
  bool on_region(ByteReader reader);
  // Windows of paths that do not exist are ignored.
  bool on_window(ByteReader reader, const std::function<bool(PathId)>& exists);

 private:
  using Waiting = std::unordered_map<std::uint64_t, std::vector<OperationPtr>>;

  void give(const OperationPtr& operation, const std::shared_ptr<const RemoteRegion>& region);
  void give_open(std::uint64_t key);
  // Whether windows of it are on their way.
  bool opening(const RemoteRegion& region) const;

  [[no_unique_address]] ThreadOwner thread_;
  PeerId peer_;
  std::string label_;  // of the peer, for error texts
  NicLinkOwner& owner_;
  OperationBook& operations_;
  std::size_t paths_ = 0;
  std::unordered_map<std::uint64_t, std::shared_ptr<RemoteRegion>> regions_;
  std::unordered_map<Imm, std::vector<std::uint64_t>> granted_;
  Waiting asked_;    // for the peer's answer
  Waiting opening_;  // for windows
};

}  // namespace kvxfer
