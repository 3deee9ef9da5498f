#include "fabric/ofi/device.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "operation.hpp"

namespace kvxfer::ofi {
namespace {

constexpr std::uint64_t kGbit = 1'000'000'000u;

// A way to ask a provider for the needed capabilities.
struct Request {
  std::string provider;
  const char* fabric = nullptr;  // one of the provider's fabrics; null: any
  std::uint64_t caps = 0;        // capabilities beyond those always needed
  std::uint64_t mode = 0;
  int mr_mode = 0;
};

Result<InfoPtr> ask(const Libfabric& library, const Request& request) {
  const auto made = [&](fi_info* info) { return InfoPtr(info, InfoFreer{library.freeinfo}); };
  const InfoPtr hints = made(library.dupinfo(nullptr));
  if (!hints) return Error{Errc::out_of_memory, "no memory to ask libfabric"};
  hints->caps = FI_RMA | FI_MSG | FI_WRITE | FI_REMOTE_WRITE | FI_SEND | FI_RECV | request.caps;
  hints->mode = FI_CONTEXT | FI_CONTEXT2 | request.mode;
  hints->fabric_attr->prov_name = ::strdup(request.provider.c_str());
  if (request.fabric) hints->fabric_attr->name = ::strdup(request.fabric);
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->threading = FI_THREAD_SAFE;  // memory is registered on other threads
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->av_type = FI_AV_TABLE;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | request.mr_mode;
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
  fi_info* found = nullptr;
  const std::uint32_t version = std::min(kInterface, library.version());
  const int error = library.getinfo(version, nullptr, nullptr, 0, hints.get(), &found);
  if (error != 0) return library.failed("fi_getinfo", error);
  return made(found);
}

// Returns the requests to try, best first: without receives for immediates (FI_RX_CQ_DATA) if the
// device can do that; without keys of the provider's choice, which can be guessed, if it lets us
// choose; with memory of GPUs.
std::vector<Request> requests_for(const std::string& provider) {
  std::vector<Request> requests;
  if (provider != "efa") {
    for (const int mr_mode : {0, FI_MR_PROV_KEY}) {
      for (const std::uint64_t mode : {std::uint64_t{0}, std::uint64_t{FI_RX_CQ_DATA}}) {
        requests.push_back({.provider = provider, .mode = mode, .mr_mode = mr_mode});
      }
    }
    return requests;
  }
  // FI_REMOTE_COMM alone keeps the fabric "efa" from going through shm to peers on this host.
  for (const auto& [fabric, caps] : {std::pair{"efa-direct", std::uint64_t{0}},
                                     std::pair{"efa", std::uint64_t{FI_REMOTE_COMM}}}) {
    for (const std::uint64_t mode : {std::uint64_t{0}, std::uint64_t{FI_RX_CQ_DATA}}) {
      for (const bool gpus : {true, false}) {
        requests.push_back({.provider = provider,
                            .fabric = fabric,
                            .caps = caps | (gpus ? FI_HMEM : 0),
                            .mode = mode,
                            .mr_mode = FI_MR_PROV_KEY | (gpus ? FI_MR_HMEM : 0)});
      }
    }
  }
  return requests;
}

bool is_loopback(const Device& device) { return device.name == "lo"; }

Device describe(InfoPtr info, const std::string& provider) {
  Device device{.info = std::move(info)};
  const fi_info& found = *device.info;
  const bool named = found.nic && found.nic->device_attr && found.nic->device_attr->name;
  device.name = named ? found.nic->device_attr->name : found.domain_attr->name;
  device.network = "ofi-" + provider;
  device.bits_per_second = found.nic && found.nic->link_attr ? found.nic->link_attr->speed : 0;
  if (device.bits_per_second == 0) device.bits_per_second = (provider == "efa" ? 100 : 10) * kGbit;
  device.ordered = provider == "tcp";
  device.takes_gpus = (found.caps & FI_HMEM) != 0;
  device.keys_fence = std::string_view(found.fabric_attr->name) == "efa-direct";
  return device;
}

bool suffices(const fi_info& info, const std::string& provider) {
  return provider == info.fabric_attr->prov_name && info.domain_attr->cq_data_size >= sizeof(Imm) &&
         info.ep_attr->max_msg_size >= kMaxWriteBytes &&
         (!info.nic || !info.nic->link_attr || info.nic->link_attr->state != FI_LINK_DOWN);
}

}  // namespace

Result<std::vector<Device>> find_devices(const Libfabric& library, const std::string& provider) {
  std::string why = "none";
  for (const Request& request : requests_for(provider)) {
    auto found = ask(library, request);
    if (!found) {
      why = found.error().text;
      continue;
    }
    std::vector<Device> devices;
    for (const fi_info* info = found->get(); info; info = info->next) {
      // A device appears once for each of its addresses.
      const bool known = std::any_of(devices.begin(), devices.end(), [&](const Device& device) {
        return std::strcmp(device.info->domain_attr->name, info->domain_attr->name) == 0;
      });
      if (known || !suffices(*info, provider)) continue;
      InfoPtr own(library.dupinfo(info), InfoFreer{library.freeinfo});
      if (own) devices.push_back(describe(std::move(own), provider));
    }
    if (!devices.empty()) return devices;
  }
  return Error{Errc::fabric_unavailable,
               "libfabric " + library.version_text() + " has no device of its provider '" +
                   provider + "' that can write with immediates: " + why +
                   "; see what it has with: fi_info -p " + provider +
                   (provider == "efa" ? " (RDMA write needs a recent EFA generation, and libfabric "
                                        "2.1 or newer)"
                                      : "")};
}

std::string nic_name(const std::string& device, unsigned endpoint) {
  return device + "/" + std::to_string(endpoint);
}

std::vector<Device> choose(std::vector<Device> devices, const std::vector<std::string>& names) {
  const bool other = std::any_of(devices.begin(), devices.end(),
                                 [](const Device& device) { return !is_loopback(device); });
  std::erase_if(devices, [&](const Device& device) {
    if (names.empty()) return other && is_loopback(device);
    return std::none_of(names.begin(), names.end(), [&](const std::string& name) {
      return name == device.name || name.starts_with(device.name + "/");
    });
  });
  return devices;
}

}  // namespace kvxfer::ofi
