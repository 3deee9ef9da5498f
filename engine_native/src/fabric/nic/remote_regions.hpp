// The known memory regions of one peer, to write into: looked up by key, or sent unasked when the
// peer grants them to this engine. Engine thread only.
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

  // Queues the operation once its destination is known and its windows are open on all existing
  // paths; if it were posted before, the first path would take all writes.
  void resolve(const OperationPtr& operation);
  // Sets the number of open paths.
  void set_paths(std::size_t paths);
  void forget(std::uint64_t key);
  // Forgets the regions that were granted for the immediate.
  void forget_granted(Imm imm);
  // Forgets the windows of a lost path, and all regions without windows: their keys may have caused
  // the loss, so they are looked up again.
  void forget_path(PathId path);

  // Returns false if the frame is malformed.
  bool on_region(ByteReader reader);
  // Ignores windows of paths that do not exist. Returns false if the frame is malformed.
  bool on_window(ByteReader reader, const std::function<bool(PathId)>& exists);

 private:
  using Waiting = std::unordered_map<std::uint64_t, std::vector<OperationPtr>>;

  void give(const OperationPtr& operation, const std::shared_ptr<const RemoteRegion>& region);
  void give_open(std::uint64_t key);
  // True if windows of the region are still to open.
  bool opening(const RemoteRegion& region) const;

  [[no_unique_address]] ThreadOwner thread_;
  PeerId peer_;
  std::string label_;  // the peer's, for error texts
  NicLinkOwner& owner_;
  OperationBook& operations_;
  std::size_t paths_ = 0;
  std::unordered_map<std::uint64_t, std::shared_ptr<RemoteRegion>> regions_;
  std::unordered_map<Imm, std::vector<std::uint64_t>> granted_;
  Waiting asked_;    // waiting for the peer's answer
  Waiting opening_;  // waiting for windows
};

}  // namespace kvxfer
