// The writes of lost paths, to be posted again. Engine thread only.
//
// Both ends have stopped their NICs, and the peer has reported how many immediates of each counter
// came through the path. If the path kept the order of its writes, that many groups have arrived,
// the first ones, and the others are posted again. If it kept no order, that many immediates need
// not be counted again, but their bytes may be missing: as many writes are posted again without
// immediates (uncounted), before the others of that immediate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fabric/nic/nic_path.hpp"
#include "kvxfer/error.hpp"
#include "operation.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class LostWrites {
 public:
  using Counts = std::unordered_map<Imm, std::uint64_t>;

  LostWrites(PeerId peer, OperationBook& operations) : peer_(peer), operations_(operations) {}

  // Gives the path's unfinished writes back to their operations, and returns these. Fails if a
  // count cannot be completed, because the peer never saw writes that its NIC had acknowledged.
  Result<std::vector<OperationPtr>> give_back(NicPath& path, bool in_order, const Counts& received);
  // Fails operations that would wait for ever. If an operation ends before its uncounted writes are
  // delivered, nothing delivers them, and others of the immediate wait for them. Called at every
  // heartbeat, with all paths of the peer.
  void fail_incomplete(const std::vector<const NicPath*>& paths, std::string_view why_lost);

 private:
  static void give_back_in_order(const NicPath::Unfinished& unfinished, Counts& landed);
  void give_back(const NicPath::Unfinished& unfinished, Counts& landed, Counts& unknown);

  [[no_unique_address]] ThreadOwner thread_;
  PeerId peer_;
  OperationBook& operations_;
  // The uncounted writes of each immediate that are not delivered yet. Shared with its operations.
  std::unordered_map<Imm, std::shared_ptr<std::size_t>> uncounted_;
};

}  // namespace kvxfer
