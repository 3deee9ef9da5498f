#include "fabric/verbs/verbs_domain.hpp"

#include <algorithm>
#include <string>

#include "clock.hpp"
#include "fabric/verbs/gid_choice.hpp"
#include "fabric/verbs/verbs_loop.hpp"
#include "fabric/verbs/verbs_registration.hpp"

namespace kvxfer::verbs {
namespace {

// The most completions that one poll takes from a queue, so that no NIC occupies the engine thread.
constexpr std::size_t kMaxPolled = 256;
// The longest window that mlx5 binds (rdma-core, providers/mlx5/qp.c, set_bind_wr).
constexpr std::uint64_t kMaxWindow = std::uint64_t{1} << 31;

// Names the network of a port. NICs of different partitions cannot communicate.
std::string network_of(const Port& port) {
  if (port.link_layer == IBV_LINK_LAYER_ETHERNET) return "roce";
  const int partition = port.pkey & ~kFullMember;
  if (partition == kDefaultPartition) return "infiniband";
  return "infiniband-" + std::to_string(partition);
}

}  // namespace

Result<std::unique_ptr<NicDomain>> VerbsDomain::open(
    const std::shared_ptr<const VerbsDevice>& device, const NicContext& context) {
  const auto port = device->query_port();
  if (!port) return Error{Errc::fabric_unavailable, port.error().text};
  std::unique_ptr<VerbsDomain> domain(new VerbsDomain(device, context, *port));
  auto queues = NicQueues::create(device, port->bits_per_second, context.poller);
  if (!queues) return queues.error();
  if (auto good = (*queues)->watch(); !good) return good.error();
  domain->nic_.queues.push_back(std::move(*queues));
  auto events = AsyncEvents::watch(device, context.poller, *domain);
  if (!events) return events.error();
  domain->nic_.events = std::move(*events);
  return std::unique_ptr<NicDomain>(std::move(domain));
}

VerbsDomain::VerbsDomain(std::shared_ptr<const VerbsDevice> device, const NicContext& context,
                         const Port& port)
    : info_{.name = device->name(),
            .network = network_of(port),
            .bits_per_second = port.bits_per_second},
      nic_{.device = std::move(device),
           .context = context,
           .port = port,
           .load = {.bits_per_second = port.bits_per_second}},
      gpu_ways_({.name = info_.name,
                 .by_address = "nvidia-peermem",
                 .is_up =
                     [device = nic_.device] {
                       const auto now = device->query_port();
                       return now && now->active;
                     },
                 .open_loop = [device = nic_.device] { return VerbsLoop::open(device); }}) {}

Result<std::shared_ptr<NicRegistration>> VerbsDomain::register_memory(const MemoryRegion& region) {
  if (!region.gpu()) return VerbsRegistration::create(nic_.device, region, MemoryWay::host);
  return register_gpu_memory(region, gpu_ways_, nic_.context.gpus, [&](MemoryWay way) {
    return VerbsRegistration::create(nic_.device, region, way);
  });
}

void VerbsDomain::open_path(NicPathIdentity identity, Opened then) {
  thread_.check("VerbsDomain");
  if (!usable()) return then(nic_.down());
  VerbsPath::open(std::move(identity), nic_, std::move(then));
}

std::uint64_t VerbsDomain::max_window() const {
  return nic_.context.options.tuning.memory_windows && nic_.device->has_windows() ? kMaxWindow : 0;
}

void VerbsDomain::poll() {
  thread_.check("VerbsDomain");
  for (const auto& queues : nic_.queues) {
    std::size_t polled = 0;
    while (polled < kMaxPolled) {
      const std::size_t more = queues->poll();
      if (more == 0) break;
      polled += more;
    }
  }
  if (nic_.waiting.empty()) return;
  const std::uint64_t now = now_ns();
  for (VerbsPath* const path : std::vector(nic_.waiting)) {
    if (std::ranges::find(nic_.waiting, path) != nic_.waiting.end()) path->step(now);
  }
}

bool VerbsDomain::prepare_sleep() {
  // A failing NIC may never report that it has stopped, so the thread stays awake for the deadline.
  if (std::ranges::any_of(nic_.waiting, [](auto* path) { return path->is_stopping(); }))
    return false;
  return std::ranges::all_of(nic_.queues, [](const auto& queues) { return queues->arm(); });
}

// --- the device's own events -----------------------------------------------------------------

void VerbsDomain::on_async_event(const ibv_async_event& event) {
  switch (event.event_type) {
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_GID_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
    case IBV_EVENT_PKEY_CHANGE:
      if (event.element.port_num == nic_.device->port()) refresh_port();
      return;
    case IBV_EVENT_DEVICE_FATAL:
      return break_down("the device failed; its driver has to be reset");
    case IBV_EVENT_CQ_ERR:
      return break_down("its completion queue overran");
    case IBV_EVENT_SRQ_ERR:
      return break_down("its receive queue failed");
    case IBV_EVENT_SRQ_LIMIT_REACHED:
      for (const auto& queues : nic_.queues) {
        if (queues->receives() == event.element.srq) queues->on_receives_low();
      }
      return;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
      for (const auto& queues : nic_.queues) {
        VerbsPath* const path = queues->find(event.element.qp->qp_num);
        if (!path) continue;
        path->on_failed(event.event_type == IBV_EVENT_QP_ACCESS_ERR
                            ? "it wrote where it may not (local access violation)"
                            : "the queue pair failed");
      }
      return;
    default:
      return;
  }
}

void VerbsDomain::refresh_port() {
  const bool was_usable = usable();
  const auto port = nic_.device->query_port();
  if (port) {
    nic_.port = *port;
  } else {
    nic_.port.active = false;
  }
  if (usable() == was_usable) return;
  if (!usable()) end_paths("the link of NIC " + info_.name + " is down");
  nic_.context.events.on_nic_state(*this);
}

void VerbsDomain::break_down(const std::string& why) {
  if (nic_.broken) return;
  const bool was_usable = usable();
  nic_.broken = true;
  end_paths("NIC " + info_.name + ": " + why);
  if (was_usable) nic_.context.events.on_nic_state(*this);
}

void VerbsDomain::end_paths(const std::string& why) {
  for (const auto& queues : nic_.queues) {
    for (const auto& [number, path] : queues->paths()) path->on_nic_down(why);
  }
}

}  // namespace kvxfer::verbs
