#include "fabric/ofi/ofi_domain.hpp"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>

#include "clock.hpp"
#include "error_text.hpp"
#include "fabric/ofi/ofi_path.hpp"
#include "random.hpp"

namespace kvxfer::ofi {
namespace {

// On a NIC whose paths share endpoints.
constexpr std::size_t kMaxSharedEndpoints = 16;
constexpr std::size_t kMaxWritesOfEndpoint = 4096;
constexpr std::uint32_t kPollsBetweenEvents = 256;
// Where nothing can wake the thread, it looks again after this long, and longer each time.
constexpr std::uint64_t kFirstNapNs = 50'000;
constexpr std::uint64_t kLongestNapNs = 2'000'000;
// By then nobody connects to an endpoint whose path was shut.
constexpr std::uint64_t kParkNs = 10'000'000'000u;

std::uint64_t random_seed() {
  std::uint64_t seed = 0;
  random_bytes(&seed, sizeof seed);
  return seed;
}

}  // namespace

Result<std::unique_ptr<OfiDomain>> OfiDomain::open(std::shared_ptr<const OpenDomain> domain,
                                                   const NicContext& context, NicInfo info,
                                                   const Settings& settings) {
  std::unique_ptr<OfiDomain> made(
      new OfiDomain(std::move(domain), context, std::move(info), settings));
  if (!made->timer_) {
    return Error{Errc::out_of_memory, "no timer for NIC " + made->info_.name + ": " + errno_text()};
  }
  EventSink& sink = *made;
  if (auto good = context.poller.add(made->timer_.get(), EPOLLIN, sink); !good) return good.error();
  // One now: where that fails the NIC is of no use, and nobody should hear of it.
  if (auto place = made->find_place(0); !place) return place.error();
  made->endpoints_.front()->give_back();
  return made;
}

OfiDomain::OfiDomain(std::shared_ptr<const OpenDomain> domain, const NicContext& context,
                     NicInfo info, const Settings& settings)
    : domain_(std::move(domain)),
      context_(context),
      settings_(settings),
      info_(std::move(info)),
      load_{.bits_per_second = info_.bits_per_second},
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
      flushes_(shares_endpoints()
                   ? nullptr
                   : std::make_shared<Flushes>(domain_->device.ordered,
                                               context.options.peer_timeout, context.poller)) {}

OfiDomain::~OfiDomain() {
  if (timer_) context_.poller.remove(timer_.get(), *this);
}

Result<std::shared_ptr<NicRegistration>> OfiDomain::register_memory(const MemoryRegion& region) {
  auto made = OfiRegistration::create(domain_, flushes_, region);
  if (!made) return made.error();
  if (shares_endpoints()) {
    const std::lock_guard lock(registrations_mutex_);
    std::erase_if(registrations_, [](const auto& known) { return known.expired(); });
    registrations_.push_back(*made);
  }
  return std::shared_ptr<NicRegistration>(std::move(*made));
}

// --- paths -----------------------------------------------------------------------------------

void OfiDomain::open_path(NicPathIdentity identity, Opened then) {
  auto place = find_place(0);
  if (!place) return then(place.error());
  then(std::unique_ptr<NicPath>(std::make_unique<OfiPath>(
      std::move(identity), *this, *place->endpoint, std::move(place->landing))));
}

Result<OfiDomain::Place> OfiDomain::find_place(std::uint64_t unmet) {
  Endpoint* chosen = nullptr;
  for (const auto& endpoint : endpoints_) {
    const bool free = !endpoint->full() && endpoint->parked_ns == 0 && endpoint->open();
    if (free && !endpoint->met(unmet)) chosen = endpoint.get();
  }
  if (!chosen) {
    const fi_domain_attr& limits = *domain_->device.info->domain_attr;
    const std::size_t most =
        shares_endpoints() ? kMaxSharedEndpoints : std::min(limits.ep_cnt, limits.cq_cnt);
    if (endpoints_.size() >= most) {
      return Error{Errc::out_of_memory, "NIC " + info_.name + " has no room for another path (" +
                                            std::to_string(endpoints_.size()) + " endpoints, " +
                                            std::to_string(paths_.size()) + " paths)"};
    }
    Endpoint::Options options{
        .budget = {.writes = std::min(kMaxWritesOfEndpoint, domain_->device.info->tx_attr->size),
                   .paths = settings_.paths_per_endpoint,
                   .immediates = kImmWindow},
        .wait_object = settings_.wait_object};
    if (settings_.strict) options.disorder_seed = random_seed();
    auto opened = Endpoint::open(domain_, context_.poller, options);
    if (!opened) return opened.error();
    chosen = opened->get();
    endpoints_.push_back(std::move(*opened));
  }
  auto landing = chosen->make_landing();
  if (!landing) return landing.error();
  chosen->reserve();
  return Place{chosen, std::move(*landing)};
}

Result<OfiDomain::Place> OfiDomain::exchange(Endpoint& endpoint, std::uint64_t token) {
  auto place = find_place(token);
  if (place) endpoint.give_back();
  return place;
}

void OfiDomain::fence(Endpoint& endpoint, PeerId peer) {
  if (!shares_endpoints()) {
    if (endpoint.may_close()) endpoint.close();
    return;
  }
  std::vector<std::shared_ptr<OfiRegistration>> registrations;
  {
    const std::lock_guard lock(registrations_mutex_);
    for (const auto& known : registrations_) {
      if (auto registration = known.lock()) registrations.push_back(std::move(registration));
    }
  }
  for (const auto& registration : registrations) registration->unshare(peer);
}

void OfiDomain::release(Endpoint& endpoint) {
  endpoint.give_back();
  if (endpoint.paths() > 0) return;
  endpoint.parked_ns = now_ns();
  std::erase_if(endpoints_, [&](const auto& known) {
    return known.get() == &endpoint && endpoint.may_close();
  });
}

void OfiDomain::close_parked() {
  std::erase_if(endpoints_, [now = now_ns()](const auto& endpoint) {
    return endpoint->parked_ns != 0 && now - endpoint->parked_ns > kParkNs;
  });
}

// --- progress --------------------------------------------------------------------------------

void OfiDomain::poll() {
  if (!usable_) return;
  for (const auto& endpoint : endpoints_) {
    if (auto good = endpoint->poll(); !good) return break_down(good.error());
  }
  for (OfiPath* path : paths_) path->step();
  if (++polls_ % kPollsBetweenEvents == 0) check_device();
}

bool OfiDomain::prepare_sleep() {
  if (!usable_) return true;
  check_device();
  close_parked();
  bool blind = false;
  for (const auto& endpoint : endpoints_) {
    if (!endpoint->prepare_sleep()) return false;
    if (!endpoint->has_wait_object() && endpoint->in_flight() > 0) return false;
    blind = blind || !endpoint->has_wait_object() || endpoint->refused();
  }
  if (!blind || paths_.empty()) return true;
  const bool active = seen_activity_ != context_.receive_context.activity;
  seen_activity_ = context_.receive_context.activity;
  nap_ns_ = active ? kFirstNapNs : std::clamp(2 * nap_ns_, kFirstNapNs, kLongestNapNs);
  set_timer(nap_ns_);
  return true;
}

void OfiDomain::set_timer(std::uint64_t ns) {
  const itimerspec once{.it_interval = {},
                        .it_value = {.tv_sec = 0, .tv_nsec = static_cast<long>(ns)}};
  ::timerfd_settime(timer_.get(), 0, &once, nullptr);
}

void OfiDomain::on_events(std::uint32_t) {
  std::uint64_t times = 0;
  [[maybe_unused]] const auto got = ::read(timer_.get(), &times, sizeof times);
}

void OfiDomain::check_device() {
  const char* const failure = domain_->failure();
  if (failure) break_down({Errc::nic_lost, std::string("the device failed: ") + failure});
}

void OfiDomain::break_down(const Error& why) {
  if (!std::exchange(usable_, false)) return;
  for (OfiPath* path : paths_) path->fail(why);
  context_.events.on_nic_state(*this);
}

}  // namespace kvxfer::ofi
