#include "group/fabrics.hpp"

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>

#include "error_text.hpp"
#ifdef KVXFER_HAVE_OFI
#include "fabric/ofi/ofi_factory.hpp"
#endif
#ifdef KVXFER_HAVE_VERBS
#include "fabric/verbs/verbs_factory.hpp"
#endif
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

// Fails if no NIC has a chosen name: it is a mistake, or the NIC is gone. Passes on a host without
// NICs, which has none to choose.
Result<void> all_there(const std::vector<std::string>& chosen, const std::set<std::string>& there) {
  std::vector<std::string> unknown;
  std::copy_if(chosen.begin(), chosen.end(), std::back_inserter(unknown),
               [&](const auto& name) { return !there.contains(name); });
  if (unknown.empty() || there.empty()) return {};
  return Error{Errc::fabric_unavailable,
               "nics names " + joined(unknown) + ", which this host does not have; choose from " +
                   joined({there.begin(), there.end()}) + ", or leave nics out"};
}

Result<std::shared_ptr<NicRegistration>> gpu_unknown(const NicDomain& nic,
                                                     const MemoryRegion& region) {
  return Error{Errc::fabric_unavailable,
               "NIC " + nic.info().name + " of fabric " + std::string(nic.fabric()) +
                   " does not reach memory of " + region.gpu()->label() + " yet"};
}

}  // namespace

Result<void> Fabrics::open(const Context& context, Introduction& introduction) {
  const EngineOptions& options = context.options;
  if (auto good = open_local(context, introduction); !good) return good;
  if (auto good = open_nics(context, introduction); !good) return good;
  for (unsigned lane = 0; lane < options.tuning.lanes && options.tcp; ++lane) {
    const std::size_t window =
        std::max<std::size_t>(options.tuning.window_bytes / options.tuning.lanes, kMaxWriteBytes);
    lanes_.push_back(std::make_unique<tcp::TcpDomain>(context.poller, context.receive_context,
                                                      context.events, window));
  }
  if (local_) names_.emplace_back(local_->fabric());
  for (const auto& nic : nics_) {
    if (names_.empty() || names_.back() != nic->fabric()) names_.emplace_back(nic->fabric());
  }
  if (!lanes_.empty()) names_.emplace_back(lanes_.front()->fabric());
  // NICs last, because arming one costs most.
  if (local_) all_.push_back(local_.get());
  for (const auto& lane : lanes_) all_.push_back(lane.get());
  for (const auto& nic : nics_) all_.push_back(nic.get());
  return {};
}

Result<void> Fabrics::open_local(const Context& context, Introduction& introduction) {
  if (!context.options.local) return {};
  auto domain = local::LocalDomain::open(
      context.engine, context.poller, context.receive_context, context.events, context.local_events,
      {.gpus = context.gpus,
       .background = context.background,
       .lent = context.lent,
       .tell = [&completions = context.completions](auto text) {
         completions.push({.kind = Completion::Kind::notice, .text = std::move(text)});
       }});
  if (domain) {
    local_ = std::move(*domain);
    return {};
  }
  if (!context.options.tcp) return domain.error();
  introduction.local = false;
  context.completions.push(
      {.kind = Completion::Kind::notice,
       .text = "the local fabric is not available here, tcp is used: " + domain.error().text});
  return {};
}

Result<void> Fabrics::open_nics(const Context& context, Introduction& introduction) {
  const EngineOptions& options = context.options;
  std::set<std::string> there;
  std::vector<std::string> notices;
  const auto add = [&](NicFactory& factory) -> Result<void> {
    auto opened = factory.open({.options = options,
                                .poller = context.poller,
                                .background = context.background,
                                .gpus = context.gpus,
                                .receive_context = context.receive_context,
                                .events = context.events,
                                .first_number = static_cast<std::uint32_t>(nics_.size())});
    if (!opened) return opened.error();
    there.insert(opened->names.begin(), opened->names.end());
    notices.insert(notices.end(), opened->notices.begin(), opened->notices.end());
    for (auto& nic : opened->nics) {
      introduction.nics.push_back(nic->info());
      nics_.push_back(std::move(nic));
    }
    return {};
  };
  const auto built = built_fabrics();
  const auto missing = [&](const char* fabric, FabricUse use) {
    return use == FabricUse::required &&
           std::find(built.begin(), built.end(), fabric) == built.end();
  };
  for (const auto& [fabric, use, headers] : {std::tuple{"verbs", options.verbs, "libibverbs-dev"},
                                             std::tuple{"ofi", options.ofi, "libfabric-dev"}}) {
    if (!missing(fabric, use)) continue;
    return Error{Errc::fabric_unavailable, std::string("this build has no ") + fabric +
                                               " fabric; install " + headers +
                                               " and build kvxfer again"};
  }
#ifdef KVXFER_HAVE_VERBS
  if (options.verbs != FabricUse::never) {
    verbs::VerbsFactory factory;
    if (auto good = add(factory); !good) return good;
  }
#endif
#ifdef KVXFER_HAVE_OFI
  if (options.ofi != FabricUse::never) {
    ofi::OfiFactory factory;
    if (auto good = add(factory); !good) return good;
  }
#endif
  if (options.more_nics) {
    if (auto good = add(*options.more_nics); !good) return good;
  }
  if (auto good = all_there(options.nics, there); !good) return good;
  std::vector<std::string> idle;
  std::copy_if(options.nics.begin(), options.nics.end(), std::back_inserter(idle),
               [&](const std::string& name) {
                 return std::none_of(nics_.begin(), nics_.end(), [&](const auto& nic) {
                   const std::string& own = nic->info().name;
                   return own == name || own.starts_with(name + "/");
                 });
               });
  if (!idle.empty() && !there.empty() && notices.empty()) {
    notices.push_back("no fabric of this engine can use these members of nics: " + joined(idle) +
                      "; kvxfer doctor says what is missing");
  }
  for (std::string& notice : notices) {
    context.completions.push({.kind = Completion::Kind::notice, .text = std::move(notice)});
  }
  if (nics_.size() > kMaxNics) {
    return Error{Errc::invalid_argument, std::to_string(nics_.size()) +
                                             " NICs for one engine; choose at most 64 with nics"};
  }
  return {};
}

Result<void> Fabrics::register_memory(MemoryRegion& region, bool require_nics,
                                      CompletionQueue& completions) {
  if (require_nics && nics_.empty()) {
    return Error{Errc::fabric_unavailable,
                 "NICs are required to reach the memory, but this engine has none; kvxfer doctor "
                 "says what is missing"};
  }
  std::vector<std::shared_ptr<NicRegistration>> registrations;
  bool reached = false;
  Error failed{Errc::ok, {}};
  for (const auto& nic : nics_) {
    auto registration = region.gpu() && !nic->knows_gpus() ? gpu_unknown(*nic, region)
                                                           : nic->register_memory(region);
    registrations.push_back(registration ? *registration : nullptr);
    if (registration) {
      reached = true;
      continue;
    }
    // A link that is down does no harm if another NIC reaches the memory.
    const bool down = registration.error().code == Errc::nic_lost;
    if (!down && (require_nics || lanes_.empty())) return registration.error();
    failed = registration.error();
    tell_once(failed.text + "; its bytes take another path", completions);
  }
  if (!reached && !nics_.empty() && (require_nics || lanes_.empty())) return failed;
  region.set_registrations(std::move(registrations));
  return {};
}

void Fabrics::tell_once(std::string text, CompletionQueue& completions) {
  const std::lock_guard lock(mutex_);
  if (!told_.insert(text).second) return;
  completions.push({.kind = Completion::Kind::notice, .text = std::move(text)});
}

// --- driving them ----------------------------------------------------------------------------

void Fabrics::send_owed() {
  thread_.check("Fabrics");
  for (const auto& lane : lanes_) lane->poll();
}

void Fabrics::poll() {
  thread_.check("Fabrics");
  if (local_) local_->poll();
  for (const auto& nic : nics_) nic->poll();
}

bool Fabrics::prepare_sleep() {
  return std::all_of(all_.begin(), all_.end(),
                     [](Domain* domain) { return domain->prepare_sleep(); });
}

void Fabrics::finish_sleep() {
  for (Domain* const domain : all_) domain->finish_sleep();
}

void Fabrics::forget_source(const MemoryRegion& region) {
  thread_.check("Fabrics");
  for (Domain* const domain : all_) domain->forget_source(region);
}

void Fabrics::close_local() {
  std::erase(all_, local_.get());
  local_.reset();
}

}  // namespace kvxfer
