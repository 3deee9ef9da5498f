// What the group does for NICs: opening them, their memory, their paths.
#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>

#include "clock.hpp"
#include "domain_group.hpp"
#ifdef KVXFER_HAVE_OFI
#include "fabric/ofi/ofi_factory.hpp"
#endif
#ifdef KVXFER_HAVE_VERBS
#include "fabric/verbs/verbs_factory.hpp"
#endif
#include "error_text.hpp"
#include "kvxfer/engine.hpp"

namespace kvxfer {

std::vector<std::string> built_fabrics() {
  std::vector<std::string> names{"local", "tcp"};
#ifdef KVXFER_HAVE_VERBS
  names.emplace_back("verbs");
#endif
#ifdef KVXFER_HAVE_OFI
  names.emplace_back("ofi");
#endif
  return names;
}

namespace {

// A name that no NIC has is a mistake, or a NIC that is gone. On a host without NICs nothing was to
// be had anyway.
Result<void> all_there(const std::vector<std::string>& chosen, const std::set<std::string>& there) {
  std::vector<std::string> unknown;
  std::copy_if(chosen.begin(), chosen.end(), std::back_inserter(unknown),
               [&](const auto& name) { return !there.contains(name); });
  if (unknown.empty() || there.empty()) return {};
  return Error{Errc::fabric_unavailable,
               "nics names " + joined(unknown) + ", which this host does not have; choose from " +
                   joined({there.begin(), there.end()}) + ", or leave nics out"};
}

}  // namespace

Result<void> DomainGroup::open_nics(ReceiveContext receive_context) {
  std::set<std::string> there;
  std::vector<std::string> notices;
  const auto add = [&](NicFactory& factory) -> Result<void> {
    NicEvents& events = *this;
    auto opened = factory.open({.options = options_,
                                .poller = poller_,
                                .background = background_,
                                .receive_context = receive_context,
                                .events = events,
                                .first_number = static_cast<std::uint32_t>(nics_.size())});
    if (!opened) return opened.error();
    there.insert(opened->names.begin(), opened->names.end());
    notices.insert(notices.end(), opened->notices.begin(), opened->notices.end());
    for (auto& nic : opened->nics) {
      identity_.introduction.nics.push_back(nic->info());
      nics_.push_back(std::move(nic));
    }
    return {};
  };
  const auto built = built_fabrics();
  const auto missing = [&](const char* fabric, FabricUse use) {
    return use == FabricUse::required &&
           std::find(built.begin(), built.end(), fabric) == built.end();
  };
  for (const auto& [fabric, use, headers] : {std::tuple{"verbs", options_.verbs, "libibverbs-dev"},
                                             std::tuple{"ofi", options_.ofi, "libfabric-dev"}}) {
    if (!missing(fabric, use)) continue;
    return Error{Errc::fabric_unavailable, std::string("this build has no ") + fabric +
                                               " fabric; install " + headers +
                                               " and build kvxfer again"};
  }
#ifdef KVXFER_HAVE_VERBS
  if (options_.verbs != FabricUse::never) {
    verbs::VerbsFactory factory;
    if (auto good = add(factory); !good) return good;
  }
#endif
#ifdef KVXFER_HAVE_OFI
  if (options_.ofi != FabricUse::never) {
    ofi::OfiFactory factory;
    if (auto good = add(factory); !good) return good;
  }
#endif
  if (options_.more_nics) {
    if (auto good = add(*options_.more_nics); !good) return good;
  }
  if (auto good = all_there(options_.nics, there); !good) return good;
  std::vector<std::string> idle;
  std::copy_if(options_.nics.begin(), options_.nics.end(), std::back_inserter(idle),
               [&](const std::string& name) {
                 return std::none_of(nics_.begin(), nics_.end(), [&](const auto& nic) {
                   const std::string& own = nic->info().name;
                   return own == name || own.starts_with(name + "/");
                 });
               });
  if (!idle.empty() && !there.empty() && notices.empty()) {
    notices.push_back("no fabric of this engine can use what nics names: " + joined(idle) +
                      "; kvxfer doctor says what is missing");
  }
  for (std::string& notice : notices) {
    completions_->push({.kind = Completion::Kind::notice, .text = std::move(notice)});
  }
  if (nics_.size() > kMaxNics) {
    return Error{Errc::invalid_argument, std::to_string(nics_.size()) +
                                             " NICs for one engine; choose at most 64 with nics"};
  }
  return {};
}

// --- memory ----------------------------------------------------------------------------------

Result<void> DomainGroup::register_region(const RegionPtr& region) {
  std::vector<std::shared_ptr<NicRegistration>> registrations;
  for (const auto& nic : nics_) {
    auto registration = nic->register_memory(*region);
    // Without another way to the memory it is an error, otherwise that way is taken.
    if (!registration && !options_.tcp) return registration.error();
    registrations.push_back(registration ? std::move(*registration) : nullptr);
    if (!registration) {
      completions_->push({.kind = Completion::Kind::notice,
                          .text = registration.error().text + "; it goes over tcp instead"});
    }
  }
  region->set_registrations(std::move(registrations));
  regions_.insert(region);
  return {};
}

void DomainGroup::share_region(Peer& peer, std::uint64_t key) {
  const RegionPtr region = regions_.find(key);
  const bool foreign = region && region->granted() && region->granted()->writer != peer.id();
  if (!region || foreign) {
    stats_.writes_refused.count(Errc::unknown_region);
    return peer.nics()->send_region(key, Errc::unknown_region, {});
  }
  share_region(peer, region);
}

// A grant's keys are those of the region that it is of, except where its NIC opens windows.
void DomainGroup::share_region(Peer& peer, const RegionPtr& region) {
  auto remote = std::make_shared<RemoteRegion>();
  remote->length = region->size();
  remote->keys.resize(nics_.size());
  const auto& grant = region->granted();
  const MemoryRegion& registered = grant ? *grant->of : *region;
  std::vector<std::uint32_t> shared;
  for (std::uint32_t n = 0; n < nics_.size(); ++n) {
    const bool windows =
        grant && region->size() <= nics_[n]->max_window() && registered.registration(n);
    if (windows) {
      remote->windowed = true;
    } else if (registered.registration(n)) {
      shared.push_back(n);
    }
  }
  if (grant) remote->imm = grant->imm;
  const auto tell = [this, region, remote](Peer& to) {
    const bool there = regions_.find(region->key()) == region;
    if (there && region->granted()) return to.nics()->open_grant(region, *remote);
    to.nics()->send_region(region->key(), there ? Errc::ok : Errc::unknown_region, *remote);
  };
  if (shared.empty()) return tell(peer);
  background_.run(
      [id = peer.id(), region, remote, shared] {
        const MemoryRegion& of = region->granted() ? *region->granted()->of : *region;
        const auto offset = static_cast<std::uint64_t>(region->data() - of.data());
        for (const std::uint32_t n : shared) {
          auto key = of.registration(n)->share(id);
          if (!key) continue;
          key->address += offset;
          remote->keys[n] = *key;
        }
      },
      [this, id = peer.id(), region, tell] {
        const auto found = peers_.find(id);
        if (found != peers_.end()) return tell(*found->second);
        // It was lost meanwhile.
        const RegionPtr& of = region->granted() ? region->granted()->of : region;
        background_.run([of, id] { of->unshare(id); }, [] {});
      });
}

// --- paths -----------------------------------------------------------------------------------

void DomainGroup::on_lost(Path& path, Error error) {
  for (const auto& [id, peer] : peers_) {
    if (peer->nics() && peer->nics()->owns(path)) {
      return peer->nics()->on_path_lost(path, std::move(error));
    }
    for (const auto& known : peer->paths()) {
      if (known.get() == &path) return peer->lose(std::move(error));
    }
  }
}

void DomainGroup::on_nic_state(NicDomain& domain) {
  ++activity_;
  completions_->push(
      {.kind = Completion::Kind::notice,
       .text = "NIC " + domain.info().name + (domain.usable() ? " is usable again" : " is down")});
  for (const auto& [id, peer] : peers_) {
    if (peer->nics()) peer->nics()->announce_nics();
  }
}

void DomainGroup::on_window(NicPath& path, std::uint64_t grant) {
  const auto found = peers_.find(path.identity().peer);
  if (found != peers_.end()) found->second->nics()->on_window(path, grant);
}

void DomainGroup::on_credit_due(NicPath& path) {
  const auto found = peers_.find(path.identity().peer);
  if (found != peers_.end()) found->second->nics()->on_credit_due(path);
}

}  // namespace kvxfer
