#include "group/exposed_memory.hpp"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "clock.hpp"

namespace kvxfer {
namespace {

// The time for a peer to stop writing by itself, before its paths are reset. At 1 Gbit/s or more,
// writes under way take less than this.
constexpr std::uint64_t kAskNs = 150'000'000u;

Error bad_range(const RegionRange& range) {
  return {Errc::out_of_bounds, "cannot grant " + std::to_string(range.length) +
                                   " bytes at offset " + std::to_string(range.offset) +
                                   " of a region of " + std::to_string(range.region->size()) +
                                   " bytes; grant at least 1 byte, all within the region"};
}

}  // namespace

// --- telling peers ---------------------------------------------------------------------------

void ExposedMemory::share(Peer& peer, std::uint64_t key) {
  thread_.check("ExposedMemory");
  const RegionPtr region = context_.regions.find(key);
  const bool foreign = region && region->granted() && region->granted()->writer != peer.id();
  if (!region || foreign) {
    context_.stats.writes_refused.count(Errc::unknown_region);
    return peer.nics()->send_region(key, Errc::unknown_region, {});
  }
  share(peer, region);
}

// A grant has the keys of its region, except on NICs that open windows.
void ExposedMemory::share(Peer& peer, const RegionPtr& region) {
  thread_.check("ExposedMemory");
  const auto& nics = context_.fabrics.nics();
  auto remote = std::make_shared<RemoteRegion>();
  remote->length = region->size();
  remote->keys.resize(nics.size());
  const auto& grant = region->granted();
  const MemoryRegion& registered = grant ? *grant->of : *region;
  std::vector<std::uint32_t> shared;
  for (std::uint32_t n = 0; n < nics.size(); ++n) {
    const NicRegistration* const registration = registered.registration(n);
    if (!registration) continue;
    if (grant && region->size() <= nics[n]->max_window() && registration->takes_windows()) {
      remote->windowed = true;
    } else {
      shared.push_back(n);
    }
  }
  if (grant) remote->imm = grant->imm;
  const auto tell = [this, region, remote](Peer& to) {
    const bool there = context_.regions.find(region->key()) == region;
    if (there && region->granted()) return to.nics()->open_grant(region, *remote);
    to.nics()->send_region(region->key(), there ? Errc::ok : Errc::unknown_region, *remote);
  };
  if (shared.empty()) return tell(peer);
  context_.background.run(
      [id = peer.id(), region, remote, shared] {
        const MemoryRegion& of = region->granted() ? *region->granted()->of : *region;
        const std::uint64_t offset = region->address() - of.address();
        for (const std::uint32_t n : shared) {
          auto key = of.registration(n)->share(id);
          if (!key) continue;
          key->address += offset;
          remote->keys[n] = *key;
        }
      },
      [this, id = peer.id(), region, tell] {
        if (Peer* const found = context_.peers.find(id)) return tell(*found);
        // The peer was lost meanwhile.
        const RegionPtr& of = region->granted() ? region->granted()->of : region;
        context_.background.run([of, id] { of->unshare(id); }, [] {});
      });
}

// --- granting --------------------------------------------------------------------------------

Result<std::vector<RegionPtr>> ExposedMemory::make_grants(Imm imm,
                                                          std::span<const RegionRange> ranges) {
  const auto writer = context_.counters.writer(imm);
  if (!writer) {
    return Error{Errc::invalid_argument,
                 "counter " + std::to_string(imm) +
                     " is not live or has no writer; allocate it for the peer that is to write"};
  }
  std::vector<RegionPtr> grants;
  for (const RegionRange& range : ranges) {
    const std::uint64_t size = range.region->size();
    if (range.length == 0 || range.offset > size || range.length > size - range.offset) {
      return bad_range(range);
    }
    if (range.region->granted() || context_.regions.find(range.region->key()) != range.region) {
      return Error{Errc::unknown_region,
                   "the region is not registered at this engine, so none of it can be granted"};
    }
    grants.push_back(MemoryRegion::grant(context_.engine, range, imm, *writer));
  }
  // No peer knows their keys yet.
  for (const RegionPtr& grant : grants) context_.regions.insert(grant);
  return grants;
}

void ExposedMemory::drop_grants(std::span<const RegionPtr> grants) {
  for (const RegionPtr& grant : grants) context_.regions.erase(grant->key());
}

void ExposedMemory::track_grants(Imm imm, const std::vector<RegionPtr>& grants) {
  thread_.check("ExposedMemory");
  const bool live = context_.counters.live(imm);
  for (const RegionPtr& grant : grants) {
    const RegionPtr& of = grant->granted()->of;
    if (!live || context_.regions.find(of->key()) != of) {
      context_.regions.erase(grant->key());
      continue;
    }
    grants_[imm].push_back(grant);
    Peer* const writer = context_.peers.find(grant->granted()->writer);
    if (writer && writer->nics()) share(*writer, grant);
  }
}

// Closes the grants. If the receiver places the bytes, nothing lands in them any more.
void ExposedMemory::close_grants(const std::vector<RegionPtr>& grants) {
  for (const RegionPtr& grant : grants) {
    context_.regions.erase(grant->key());
    for (const auto& [id, peer] : context_.peers.all()) {
      for (const auto& path : peer->paths()) path->revoke_region(grant->key());
    }
  }
}

// Closes the grants of a region that is to be unregistered, which no open window may outlive.
void ExposedMemory::close_grants_of(const RegionPtr& region) {
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
  for (const auto& [id, peer] : context_.peers.all()) {
    NicLink* const link = peer->nics();
    if (!link) continue;
    if (link->has_windows_of(*region)) {
      link->reset("a region is deregistered while grants of it are open");
    }
    link->close_grants(grants);
    for (const RegionPtr& grant : grants) {
      if (grant->granted()->writer == id) link->forget_region(grant->key());
    }
  }
}

// --- revoking --------------------------------------------------------------------------------

bool ExposedMemory::release_counter(Imm imm, std::shared_ptr<std::promise<void>> done) {
  thread_.check("ExposedMemory");
  auto [asked, copying] = revoke(imm);
  if (asked.empty() && !copying) return false;
  auto granted = grants_.extract(imm);
  revocations_.push_back(
      {.imm = imm,
       .asked = std::move(asked),
       .grants = granted ? std::move(granted.mapped()) : std::vector<RegionPtr>(),
       .deadline_ns = now_ns() + kAskNs,
       .copying = copying,
       .done = std::move(done)});
  if (copying) {
    context_.gpus.after_copies([this, imm] {
      for (Revocation& revocation : revocations_) {
        if (revocation.imm == imm) revocation.copying = false;
      }
      end_revocations();
    });
  }
  return true;
}

// Revokes the counter. Returns what must be awaited; if that is nothing, its grants are closed.
ExposedMemory::Revoked ExposedMemory::revoke(Imm imm) {
  const auto writer = context_.counters.writer(imm);
  const auto released = context_.counters.release(imm);
  const auto granted = grants_.find(imm);
  if (granted != grants_.end()) close_grants(granted->second);
  std::vector<PeerId> asked;
  for (const auto& [id, peer] : context_.peers.all()) {
    for (const auto& path : peer->paths()) path->revoke_counter(imm);
    const bool may_write = peer->nics() && (!writer || *writer == id);
    if (!may_write || released == ImmCounters::Released::was_not_live) continue;
    const bool complete = released == ImmCounters::Released::complete;
    peer->nics()->revoke(imm, complete);
    if (!complete) asked.push_back(id);
    if (complete && granted != grants_.end()) peer->nics()->close_grants(granted->second);
  }
  // Writes of peers that are being closed may still land.
  for (const auto& [id, closing] : context_.peers.closing()) {
    const bool may_write = closing.peer->nics() && (!writer || *writer == id);
    if (may_write && released == ImmCounters::Released::pending) asked.push_back(id);
  }
  // Also if it is complete: more than was announced may be under way.
  const bool copying = released != ImmCounters::Released::was_not_live && context_.gpus.busy();
  if (asked.empty() && !copying && granted != grants_.end()) grants_.erase(granted);
  return {std::move(asked), copying};
}

void ExposedMemory::on_revoked(PeerId peer, Imm imm) {
  thread_.check("ExposedMemory");
  for (Revocation& revocation : revocations_) {
    if (revocation.imm == imm) std::erase(revocation.asked, peer);
  }
  end_revocations();
}

void ExposedMemory::forget(PeerId peer) {
  thread_.check("ExposedMemory");
  if (!context_.fabrics.nics().empty()) {
    context_.background.run(
        [regions = context_.regions.all(), peer] {
          for (const RegionPtr& region : regions) region->unshare(peer);
        },
        [] {});
  }
  for (Revocation& revocation : revocations_) std::erase(revocation.asked, peer);
  end_revocations();
}

void ExposedMemory::end_revocations() {
  std::erase_if(revocations_, [this](const Revocation& revocation) {
    if (!revocation.asked.empty() || revocation.copying) return false;
    for (const auto& [id, peer] : context_.peers.all()) {
      if (peer->nics()) peer->nics()->close_grants(revocation.grants);
    }
    context_.gpus.after_flush(
        [&told = context_.completions, imm = revocation.imm, done = revocation.done] {
          done ? done->set_value() : told.push({.kind = Completion::Kind::released, .id = imm});
        });
    return true;
  });
}

void ExposedMemory::reset_late_writers(std::uint64_t now) {
  thread_.check("ExposedMemory");
  bool ended = false;
  for (Revocation& revocation : revocations_) {
    if (revocation.asked.empty() || now < revocation.deadline_ns) continue;
    const bool first = !std::exchange(revocation.reset, true);
    // Peers that are closed meanwhile are forgotten once none of their writes lands.
    ended |= std::erase_if(revocation.asked, [&](PeerId id) {
               Peer* const peer = context_.peers.find(id);
               if (!peer) return false;
               NicLink& link = *peer->nics();
               if (first) link.reset("the peer did not stop writing to a released counter in time");
               return !link.fencing();
             }) > 0;
  }
  if (ended) end_revocations();
}

std::uint64_t ExposedMemory::next_deadline_ns() const {
  std::uint64_t next = UINT64_MAX;
  for (const Revocation& revocation : revocations_) {
    if (!revocation.asked.empty()) next = std::min(next, revocation.deadline_ns);
  }
  return next;
}

// --- regions ---------------------------------------------------------------------------------

void ExposedMemory::take_back(const RegionPtr& region) {
  thread_.check("ExposedMemory");
  context_.regions.erase(region->key());
  close_grants_of(region);
  for (const auto& [id, peer] : context_.peers.all()) {
    for (const auto& path : peer->paths()) path->revoke_region(region->key());
    if (peer->nics()) peer->nics()->forget_region(region->key());
  }
}

bool ExposedMemory::has_windows_of(const MemoryRegion& region) const {
  const auto writable = [&](const Peer& peer) {
    return peer.nics() && peer.nics()->has_windows_of(region);
  };
  const auto& peers = context_.peers;
  return std::any_of(peers.all().begin(), peers.all().end(),
                     [&](const auto& entry) { return writable(*entry.second); }) ||
         std::any_of(peers.closing().begin(), peers.closing().end(),
                     [&](const auto& entry) { return writable(*entry.second.peer); });
}

}  // namespace kvxfer
