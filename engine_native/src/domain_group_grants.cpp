// What peers may write, and taking it back: counters and the ranges granted with them.
#include <algorithm>

#include "clock.hpp"
#include "domain_group.hpp"

namespace kvxfer {
namespace {

// For a peer to stop writing by itself, before its paths are reset: what may be under way takes
// less than this from a gigabit a second up.
constexpr std::uint64_t kAskNs = 150'000'000u;

Error bad_range(const RegionRange& range) {
  return {Errc::out_of_bounds, "cannot grant " + std::to_string(range.length) +
                                   " bytes at offset " + std::to_string(range.offset) +
                                   " of a region of " + std::to_string(range.region->size()) +
                                   " bytes; grant at least 1 byte, all within the region"};
}

}  // namespace

// --- granting --------------------------------------------------------------------------------

Result<std::vector<MrDescriptor>> DomainGroup::grant(Imm imm, std::span<const RegionRange> ranges) {
  const auto writer = counters_.writer(imm);
  if (!writer) {
    return Error{Errc::invalid_argument,
                 "counter " + std::to_string(imm) +
                     " is not live or has no writer; allocate it for the peer that is to write"};
  }
  std::vector<RegionPtr> grants;
  std::vector<MrDescriptor> descriptors;
  for (const RegionRange& range : ranges) {
    const std::uint64_t size = range.region->size();
    if (range.length == 0 || range.offset > size || range.length > size - range.offset) {
      return bad_range(range);
    }
    if (range.region->granted() || regions_.find(range.region->key()) != range.region) {
      return Error{Errc::unknown_region,
                   "the region is not registered at this engine, so none of it can be granted"};
    }
    grants.push_back(MemoryRegion::grant(address_.engine, range, imm, *writer));
    descriptors.push_back(grants.back()->descriptor());
  }
  // Nobody knows their keys yet.
  for (const RegionPtr& grant : grants) regions_.insert(grant);
  if (!post([this, imm, grants] { track_grants(imm, grants); })) {
    for (const RegionPtr& grant : grants) regions_.erase(grant->key());
    return Error{Errc::engine_closed, "this engine was closed"};
  }
  return descriptors;
}

// Here, in order with releasing the counter and with deregistering the regions.
void DomainGroup::track_grants(Imm imm, const std::vector<RegionPtr>& grants) {
  const bool live = counters_.live(imm);
  for (const RegionPtr& grant : grants) {
    const RegionPtr& of = grant->granted()->of;
    if (!live || regions_.find(of->key()) != of) {
      regions_.erase(grant->key());
      continue;
    }
    grants_[imm].push_back(grant);
    const auto peer = peers_.find(grant->granted()->writer);
    if (peer != peers_.end() && peer->second->nics()) share_region(*peer->second, grant);
  }
}

// Where the receiver places the bytes, nothing lands in them any more.
void DomainGroup::close_grants(const std::vector<RegionPtr>& grants) {
  for (const RegionPtr& grant : grants) {
    regions_.erase(grant->key());
    for (const auto& [id, peer] : peers_) {
      for (const auto& path : peer->paths()) path->revoke_region(grant->key());
    }
  }
}

// Before the region is unregistered, which no open window of it may outlive.
void DomainGroup::close_grants_of(const RegionPtr& region) {
  std::vector<RegionPtr> grants;
  for (auto& [imm, granted] : grants_) {
    std::erase_if(granted, [&](const RegionPtr& grant) {
      if (grant->granted()->of != region) return false;
      grants.push_back(grant);
      return true;
    });
  }
  for (const Revocation& revocation : revocations_) {
    std::copy_if(revocation.grants.begin(), revocation.grants.end(), std::back_inserter(grants),
                 [&](const RegionPtr& grant) { return grant->granted()->of == region; });
  }
  close_grants(grants);
  for (const auto& [id, peer] : peers_) {
    NicLink* const link = peer->nics();
    if (!link) continue;
    if (link->has_windows_of(*region)) {
      link->reset("a region is deregistered whose grants are open still");
    }
    link->close_grants(grants);
    for (const RegionPtr& grant : grants) {
      if (grant->granted()->writer == id) link->forget_region(grant->key());
    }
  }
}

// --- revoking --------------------------------------------------------------------------------

bool DomainGroup::release_counter(Imm imm, bool wait) {
  auto done = std::make_shared<std::promise<void>>();
  bool pending = false;
  const bool running = run_on_engine_thread([&] {
    auto asked = revoke(imm);
    pending = !asked.empty();
    if (!pending) return;
    const auto granted = grants_.extract(imm);
    revocations_.push_back({.imm = imm,
                            .asked = std::move(asked),
                            .grants = granted ? granted.mapped() : std::vector<RegionPtr>(),
                            .deadline_ns = now_ns() + kAskNs,
                            .done = wait ? done : nullptr});
  });
  if (!running || !pending) return true;
  if (wait) await(done->get_future());
  return wait;
}

// Which peers have to be waited for; where there are none, its grants are closed.
std::vector<PeerId> DomainGroup::revoke(Imm imm) {
  const auto writer = counters_.writer(imm);
  const auto released = counters_.release(imm);
  const auto granted = grants_.find(imm);
  if (granted != grants_.end()) close_grants(granted->second);
  std::vector<PeerId> asked;
  for (const auto& [id, peer] : peers_) {
    for (const auto& path : peer->paths()) path->revoke_counter(imm);
    const bool may_write = peer->nics() && (!writer || *writer == id);
    if (!may_write || released == ImmCounters::Released::was_not_live) continue;
    const bool complete = released == ImmCounters::Released::complete;
    peer->nics()->revoke(imm, complete);
    if (!complete) asked.push_back(id);
    if (complete && granted != grants_.end()) peer->nics()->close_grants(granted->second);
  }
  // Of those that are being closed something may land still.
  for (const auto& [id, closing] : closing_) {
    const bool may_write = closing.peer->nics() && (!writer || *writer == id);
    if (may_write && released == ImmCounters::Released::pending) asked.push_back(id);
  }
  if (asked.empty() && granted != grants_.end()) grants_.erase(granted);
  return asked;
}

void DomainGroup::on_revoked(Peer& peer, Imm imm) {
  for (Revocation& revocation : revocations_) {
    if (revocation.imm == imm) std::erase(revocation.asked, peer.id());
  }
  end_revocations();
}

void DomainGroup::forget_revocations(PeerId peer) {
  for (Revocation& revocation : revocations_) std::erase(revocation.asked, peer);
  end_revocations();
}

void DomainGroup::end_revocations() {
  std::erase_if(revocations_, [this](const Revocation& revocation) {
    if (!revocation.asked.empty()) return false;
    for (const auto& [id, peer] : peers_) {
      if (peer->nics()) peer->nics()->close_grants(revocation.grants);
    }
    if (revocation.done) {
      revocation.done->set_value();
    } else {
      completions_->push({.kind = Completion::Kind::released, .id = revocation.imm});
    }
    return true;
  });
}

void DomainGroup::reset_late_writers(std::uint64_t now) {
  bool ended = false;
  for (Revocation& revocation : revocations_) {
    if (now < revocation.deadline_ns) continue;
    const bool first = !std::exchange(revocation.reset, true);
    // Those that are closed meanwhile are forgotten once nothing of them lands.
    ended |= std::erase_if(revocation.asked, [&](PeerId id) {
               const auto found = peers_.find(id);
               if (found == peers_.end()) return false;
               NicLink& link = *found->second->nics();
               if (first) link.reset("the peer did not stop writing to a released counter in time");
               return !link.fencing();
             }) > 0;
  }
  if (ended) end_revocations();
}

}  // namespace kvxfer
