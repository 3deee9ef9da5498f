// What becomes of writes whose path was lost. Engine thread only.
//
// Both ends have stopped their NICs, and the peer has said how many immediates of each counter came
// through the path. Where it kept the order of its writes, so many groups are there, the first
// ones, and the others are posted again. Where it kept none, that many need not be counted again,
// but their bytes may not be there: as many writes are posted again without immediates (uncounted),
// before the others of that immediate.
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

  // Gives the path's unfinished writes back to their operations, which it returns. An error if a
  // count cannot be completed: the peer never saw what its NIC had acknowledged.
  Result<std::vector<OperationPtr>> give_back(NicPath& path, bool in_order, const Counts& received);
  // At every heartbeat, with all paths of the peer. An operation may end before its uncounted
  // writes are delivered: nothing delivers them then, and others of the immediate, which would
  // wait for them for ever, fail.
  void fail_incomplete(const std::vector<const NicPath*>& paths, std::string_view why_lost);

 private:
  static void give_back_in_order(const NicPath::Unfinished& unfinished, Counts& landed);
  void give_back(const NicPath::Unfinished& unfinished, Counts& landed, Counts& unknown);

  [[no_unique_address]] ThreadOwner thread_;
  PeerId peer_;
  OperationBook& operations_;
  // Of each immediate: how many are not delivered yet. Shared with its operations.
  std::unordered_map<Imm, std::shared_ptr<std::size_t>> uncounted_;
};

}  // namespace kvxfer
