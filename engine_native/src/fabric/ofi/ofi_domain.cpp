#include "fabric/ofi/ofi_domain.hpp"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>

#include "clock.hpp"
#include "error_text.hpp"
#include "fabric/ofi/ofi_loop.hpp"
#include "fabric/ofi/ofi_path.hpp"
#include "random.hpp"

namespace kvxfer::ofi {
namespace {

// A greeting and a flush, besides a path's other writes.
constexpr std::size_t kWritesOfItsOwn = 2;
constexpr std::uint32_t kPollsBetweenEvents = 256;
// If nothing can wake the thread, it polls again after the first nap, then after twice as long each
// time.
constexpr std::uint64_t kFirstNapNs = 50'000;
constexpr std::uint64_t kLongestNapNs = 2'000'000;

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
  // Opens one endpoint now, so that a NIC that cannot open any is not reported.
  const auto first = Endpoint::open(made->domain_, context.poller, made->endpoint_options());
  if (!first) return first.error();
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
      flushes_(domain_->device.keys_fence
                   ? nullptr
                   : std::make_shared<Flushes>(domain_->device.ordered,
                                               context.options.peer_timeout, context.poller)),
      gpu_ways_(
          {.name = info_.name,
           .by_address = "FI_HMEM_CUDA",
           .is_up = [] { return true; },  // libfabric may not know
           .open_loop = [domain = domain_,
                         &poller = context.poller] { return OfiLoop::open(domain, poller); }}) {}

OfiDomain::~OfiDomain() {
  if (timer_) context_.poller.remove(timer_.get(), *this);
}

Result<std::shared_ptr<NicRegistration>> OfiDomain::register_memory(const MemoryRegion& region) {
  if (!region.gpu()) return OfiRegistration::create(domain_, flushes_, region, MemoryWay::host);
  if (!domain_->device.takes_gpus) {
    return Error{Errc::fabric_unavailable,
                 "NIC " + info_.name + " does not reach memory of " + region.gpu()->label() +
                     (info_.network == "ofi-efa"
                          ? ": libfabric " + domain_->library.version_text() +
                                " does not offer FI_HMEM; it has to find CUDA, and a NIC that can "
                                "register memory of GPUs"
                          : ": only libfabric's provider efa is asked for FI_HMEM")};
  }
  return register_gpu_memory(region, gpu_ways_, context_.gpus, [&](MemoryWay way) {
    return OfiRegistration::create(domain_, flushes_, region, way);
  });
}

// --- paths -----------------------------------------------------------------------------------

Endpoint::Options OfiDomain::endpoint_options() const {
  const fi_info& info = *domain_->device.info;
  // One receive is the greeting's.
  const std::size_t receives =
      domain_->device.mode(FI_RX_CQ_DATA) ? info.rx_attr->size - 1 : SIZE_MAX;
  Endpoint::Options options{
      .writes = std::min(kMaxWritesOfPath + kWritesOfItsOwn, info.tx_attr->size),
      .immediates = std::min<std::size_t>(kImmWindow, receives),
      .wait_object = settings_.wait_object};
  if (settings_.strict) options.disorder_seed = random_seed();
  return options;
}

void OfiDomain::open_path(NicPathIdentity identity, Opened then) {
  thread_.check("OfiDomain");
  const fi_domain_attr& limits = *domain_->device.info->domain_attr;
  if (endpoints_ >= std::min(limits.ep_cnt, limits.cq_cnt)) {
    return then(Error{Errc::out_of_memory, "NIC " + info_.name + " has no room for another path (" +
                                               std::to_string(endpoints_) + " endpoints)"});
  }
  ++endpoints_;
  using Made = Result<std::shared_ptr<Endpoint>>;
  context_.background.run<Made>(
      [domain = domain_, &poller = context_.poller, options = endpoint_options()] {
        return Endpoint::open(domain, poller, options);
      },
      [this, identity = std::move(identity), then = std::move(then)](Made made) {
        if (!made) {
          --endpoints_;
          return then(made.error());
        }
        if (!usable_) {
          take_back(std::move(*made));
          return then(Error{Errc::nic_lost, "NIC " + info_.name + " is down"});
        }
        then(
            std::unique_ptr<NicPath>(std::make_unique<OfiPath>(identity, *this, std::move(*made))));
      });
}

void OfiDomain::take_back(std::shared_ptr<Endpoint> endpoint) {
  endpoint->leave(context_.poller);
  context_.background.run([endpoint = std::move(endpoint)] {}, [this] { --endpoints_; });
}

// --- progress --------------------------------------------------------------------------------

// Also polls a device that failed, so that its paths count what had arrived before they are shut.
void OfiDomain::poll() {
  thread_.check("OfiDomain");
  for (OfiPath* path : paths_) path->poll();
  if (++polls_ % kPollsBetweenEvents == 0) check_device();
}

bool OfiDomain::prepare_sleep() {
  check_device();
  bool blind = false;
  for (const OfiPath* path : paths_) {
    Endpoint* const endpoint = path->served();
    if (!endpoint) continue;
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
