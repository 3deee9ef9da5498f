#include "fabric/ofi/flushes.hpp"

#include <algorithm>

namespace kvxfer::ofi {

Flushes::EntryPtr Flushes::add(PeerId peer, Endpoint& endpoint) {
  thread_.check("Flushes");
  auto entry = std::make_shared<Entry>(peer, &endpoint);
  const std::lock_guard lock(mutex_);
  entries_.push_back(entry);
  return entry;
}

void Flushes::finish(Entry& entry, std::uint64_t wanted) {
  thread_.check("Flushes");
  const std::lock_guard lock(mutex_);
  entry.done = wanted;
  changed_.notify_all();
}

void Flushes::remove(Entry& entry) {
  thread_.check("Flushes");
  const std::lock_guard lock(mutex_);
  entry.closed = true;
  entries_.remove_if([&](const EntryPtr& known) { return known.get() == &entry; });
  changed_.notify_all();
}

void Flushes::wait_for(const std::vector<PeerId>& peers) {
  std::vector<std::pair<EntryPtr, std::uint64_t>> waiting;
  std::unique_lock lock(mutex_);
  for (const EntryPtr& entry : entries_) {
    if (std::find(peers.begin(), peers.end(), entry->peer) == peers.end()) continue;
    waiting.emplace_back(entry, ++entry->wanted);
  }
  if (waiting.empty()) return;
  poller_.wake();
  const auto quiet = [](const auto& each) {
    return each.first->closed || each.first->done >= each.second;
  };
  if (ordered_) {
    changed_.wait_for(lock, timeout_,
                      [&] { return std::all_of(waiting.begin(), waiting.end(), quiet); });
  }
  for (const auto& each : waiting) {
    if (!quiet(each)) each.first->endpoint->reset();
  }
}

}  // namespace kvxfer::ofi
