#include "fabric/nic/lost_writes.hpp"

#include <algorithm>
#include <string>

namespace kvxfer {
namespace {

std::uint64_t count_of(const LostWrites::Counts& counts, Imm imm) {
  const auto found = counts.find(imm);
  return found == counts.end() ? 0 : found->second;
}

}  // namespace

Result<std::vector<OperationPtr>> LostWrites::give_back(NicPath& path, bool in_order,
                                                        const Counts& received) {
  thread_.check("LostWrites");
  for (const auto& [imm, known] : path.delivered()) {
    const std::uint64_t came = count_of(received, imm);
    if (came >= known) continue;
    return Error{Errc::nic_lost, "its NIC lost " + std::to_string(known - came) +
                                     " immediates of counter " + std::to_string(imm) +
                                     " that had been delivered to it: the count cannot be "
                                     "completed"};
  }
  const auto unfinished = path.take_unfinished();
  Counts unknown;
  for (const auto& [operation, writes] : unfinished) {
    if (operation->imm) unknown[*operation->imm] += operation->immediates(writes);
  }
  Counts landed;
  for (const auto& [imm, count] : unknown) {
    const std::uint64_t came = count_of(received, imm);
    landed[imm] = std::min(count, came - std::min(came, path.delivered(imm)));
  }
  std::vector<OperationPtr> touched;
  for (const auto& each : unfinished) {
    if (std::find(touched.begin(), touched.end(), each.operation) == touched.end()) {
      touched.push_back(each.operation);
    }
    in_order&& each.writes.counted ? give_back_in_order(each, landed)
                                   : give_back(each, landed, unknown);
  }
  return touched;
}

void LostWrites::give_back_in_order(const NicPath::Unfinished& unfinished, Counts& landed) {
  const auto& [operation, writes] = unfinished;
  operation->outstanding -= writes.count;
  std::size_t there = 0;
  if (operation->imm) {
    // Writes of a failed operation count, too: those of other operations came after them.
    std::uint64_t& left = landed[*operation->imm];
    while (left > 0 && there < writes.count) {
      left -= 1 - operation->writes[writes.first + there++].grouped;
    }
  }
  if (operation->code != Errc::ok) return;
  if (operation->arrived) there = writes.count;
  operation->finished += there;
  if (there == writes.count) return;
  operation->reposts.push_back({writes.first + there, writes.count - there, true});
}

void LostWrites::give_back(const NicPath::Unfinished& unfinished, Counts& landed, Counts& unknown) {
  const auto& [operation, writes] = unfinished;
  operation->outstanding -= writes.count;
  const bool counted = operation->imm && writes.counted;
  if (operation->code != Errc::ok) return;
  if (operation->arrived || (counted && landed[*operation->imm] == unknown[*operation->imm])) {
    // All writes of this immediate have arrived, so these have too.
    operation->finished += writes.count;
    if (!writes.counted) *operation->uncounted_left -= writes.count;
    return;
  }
  if (!writes.counted) {
    operation->reposts.insert(operation->reposts.begin(), writes);
    return;
  }
  std::size_t uncounted = 0;
  if (counted) {
    std::uint64_t& left = landed[*operation->imm];
    uncounted = std::min<std::uint64_t>(left, writes.count);
    left -= uncounted;
    unknown[*operation->imm] -= uncounted;
  }
  if (uncounted > 0) {
    auto& shared = uncounted_[*operation->imm];
    if (!shared) shared = std::make_shared<std::size_t>(0);
    operation->uncounted_left = shared;
    *shared += uncounted;
    operation->reposts.insert(operation->reposts.begin(), {writes.first, uncounted, false});
  }
  if (uncounted == writes.count) return;
  if (counted && uncounted_.contains(*operation->imm)) {
    operation->uncounted_left = uncounted_[*operation->imm];
  }
  operation->reposts.push_back({writes.first + uncounted, writes.count - uncounted, true});
}

void LostWrites::fail_incomplete(const std::vector<const NicPath*>& paths,
                                 std::string_view why_lost) {
  thread_.check("LostWrites");
  std::erase_if(uncounted_, [](const auto& entry) { return entry.second.use_count() == 1; });
  for (const auto& [imm, left] : uncounted_) {
    if (*left == 0) continue;
    std::size_t coming = 0;
    for (const NicPath* const path : paths) coming += path->uncounted(imm);
    const auto operations = operations_.with(peer_, imm);
    for (const OperationPtr& operation : operations) {
      for (const WriteRange& range : operation->reposts) {
        if (!range.counted) coming += range.count;
      }
    }
    if (coming >= *left) continue;
    const std::string lost = std::to_string(*left - coming);
    for (const OperationPtr& operation : operations) {
      if (operation->arrived || operation->code != Errc::ok) continue;
      operations_.fail(
          operation, Errc::nic_lost,
          "the count of immediate " + std::to_string(imm) +
              " cannot be completed: another operation ended before " + lost +
              " of its writes from a lost path were delivered again: " + std::string(why_lost));
    }
  }
}

}  // namespace kvxfer
