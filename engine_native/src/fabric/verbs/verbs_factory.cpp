#include "fabric/verbs/verbs_factory.hpp"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <string>

#include "error_text.hpp"
#include "fabric/verbs/verbs_domain.hpp"

namespace kvxfer::verbs {
namespace {

// Returns the kernel's RDMA devices, whether or not this process may use them.
std::vector<std::string> kernel_devices() {
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/class/infiniband", none)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Returns the port that `name` means if it names this device: 1 for DEVICE, PORT for DEVICE:PORT.
std::optional<std::uint8_t> port_of(const std::string& device, const std::string& name) {
  if (name == device) return 1;
  if (!name.starts_with(device + ":")) return std::nullopt;
  std::uint8_t port = 0;
  const char* const end = name.data() + name.size();
  const auto read = std::from_chars(name.data() + device.size() + 1, end, port);
  if (read.ec != std::errc() || read.ptr != end || port == 0) return std::nullopt;
  return port;
}

// iWARP has no immediates, EFA and usNIC have no reliable connections.
bool speaks_infiniband(const ibv_device& device) {
  return device.node_type == IBV_NODE_CA && device.transport_type == IBV_TRANSPORT_IB;
}

Result<std::unique_ptr<NicDomain>> open_nic(const std::shared_ptr<const VerbsLibrary>& library,
                                            ibv_device* device, const std::string& name,
                                            const NicContext& context) {
  const EngineOptions& options = context.options;
  auto opened = VerbsDevice::open(library, device,
                                  {.name = name,
                                   .number = *port_of(device->name, name),
                                   .gid_index = options.gid_index,
                                   .pkey = static_cast<std::uint16_t>(options.pkey),
                                   .mtu_bytes = options.tuning.path_mtu});
  if (!opened) return opened.error();
  return VerbsDomain::open(*opened, context);
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
  if (!library_) {
    if (required) return unusable(library_.error().text);
    // A host without the library is not meant to use them.
    if (!opened.names.empty() && VerbsLibrary::installed()) {
      opened.notices.push_back(unusable(library_.error().text).text);
    }
    return opened;
  }
  const std::vector<std::string>& asked = context.options.nics;
  int count = 0;
  ibv_device** const devices = (*library_)->get_device_list(&count);
  for (int i = 0; i < count; ++i) {
    const std::string device = devices[i]->name;
    if (std::ranges::find(opened.names, device) == opened.names.end()) {
      opened.names.push_back(device);
    }
    if (!speaks_infiniband(*devices[i])) continue;
    for (const std::string& name : asked.empty() ? std::vector{device} : asked) {
      if (!port_of(device, name)) continue;
      if (name != device) opened.names.push_back(name);
      auto domain = open_nic(*library_, devices[i], name, context);
      if (domain) {
        opened.nics.push_back(std::move(*domain));
      } else {
        opened.notices.push_back(domain.error().text);
      }
    }
  }
  if (devices) (*library_)->free_device_list(devices);
  // The order asked for decides which NICs are paired (pair_nics).
  if (!asked.empty()) {
    std::ranges::sort(opened.nics, {}, [&](const auto& nic) {
      return std::ranges::find(asked, nic->info().name) - asked.begin();
    });
  }
  if (opened.nics.empty() && required) return unusable(why_none(opened.notices, asked));
  return opened;
}

}  // namespace kvxfer::verbs
