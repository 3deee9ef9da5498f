#include "fabric/verbs/verbs_factory.hpp"

#include <algorithm>
#include <filesystem>
#include <string>

#include "fabric/verbs/verbs_domain.hpp"
#include "joined.hpp"

namespace kvxfer::verbs {
namespace {

// What the kernel has, whether or not this process may use it.
std::vector<std::string> kernel_devices() {
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/class/infiniband", none)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// iWARP has no immediates, EFA and usNIC have no reliable connections.
bool speaks_infiniband(const ibv_device& device) {
  return device.node_type == IBV_NODE_CA && device.transport_type == IBV_TRANSPORT_IB;
}

Result<std::unique_ptr<NicDomain>> open_nic(
    const std::shared_ptr<const VerbsLibrary>& library, ibv_device* device,
    const NicContext& context, const std::shared_ptr<AddressLookups::Running>& lookups) {
  auto opened = VerbsDevice::open(library, device);
  if (!opened) return opened.error();
  return VerbsDomain::open(*opened, context, lookups);
}

std::string why_none(const std::vector<std::string>& notices,
                     const std::vector<std::string>& asked) {
  if (!notices.empty()) return notices.back();
  const std::string there = joined(kernel_devices());
  if (there.empty()) {
    return "this host has no RDMA NIC; load its driver, or leave verbs out";
  }
  if (asked.empty()) {
    return "this process sees none of the RDMA NICs of this host (" + there +
           "): /dev/infiniband is missing or closed to it; give this user (group rdma) or "
           "container access to /dev/infiniband, and load ib_uverbs";
  }
  return "none of the NICs asked for (" + joined(asked) +
         ") is an RDMA NIC that this process can open; this host has " + there;
}

Error unusable(const std::string& why) {
  return {Errc::fabric_unavailable, "verbs cannot be used here: " + why};
}

}  // namespace

Result<OpenedNics> VerbsFactory::open(const NicContext& context) {
  const bool required = context.options.verbs == FabricUse::required;
  OpenedNics opened{.names = kernel_devices()};
  const auto library = VerbsLibrary::load();
  if (!library) {
    if (required) return unusable(library.error().text);
    // Without the library nobody meant to use them.
    if (!opened.names.empty() && VerbsLibrary::installed()) {
      opened.notices.push_back(unusable(library.error().text).text);
    }
    return opened;
  }
  const std::vector<std::string>& asked = context.options.nics;
  const auto wanted = [&](const ibv_device& device) {
    return asked.empty() || std::find(asked.begin(), asked.end(), device.name) != asked.end();
  };
  const auto lookups = std::make_shared<AddressLookups::Running>(0);
  int count = 0;
  ibv_device** const devices = (*library)->get_device_list(&count);
  for (int i = 0; i < count; ++i) {
    if (!speaks_infiniband(*devices[i]) || !wanted(*devices[i])) continue;
    auto domain = open_nic(*library, devices[i], context, lookups);
    if (domain) {
      opened.nics.push_back(std::move(*domain));
    } else {
      opened.notices.push_back(domain.error().text);
    }
  }
  if (devices) (*library)->free_device_list(devices);
  if (opened.nics.empty() && required) return unusable(why_none(opened.notices, asked));
  return opened;
}

}  // namespace kvxfer::verbs
