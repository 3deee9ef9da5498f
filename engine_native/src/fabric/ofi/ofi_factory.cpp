#include "fabric/ofi/ofi_factory.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "error_text.hpp"
#include "fabric/ofi/ofi_domain.hpp"

namespace kvxfer::ofi {
namespace {

// libfabric, and the provider's devices.
struct Found {
  Libfabric library;
  std::vector<Device> devices;
};

Result<Found> look(const EngineOptions& options, const Libfabric* simulated) {
  if (options.ofi_provider == "efa" && !simulated && !efa_device_present()) {
    return Error{Errc::fabric_unavailable,
                 "this host has no EFA: no device in /sys/class/infiniband is driven by efa; "
                 "attach one to the instance and load its driver (modprobe efa)"};
  }
  // Shrinks tcp's buffers for messages, which are not used here: 17 MB of each domain otherwise.
  // NOLINTNEXTLINE(concurrency-mt-unsafe): before libfabric, which reads it, is loaded
  if (options.ofi_provider == "tcp") ::setenv("FI_TCP_MAX_RX_SIZE", "128", 0);
  const auto library = simulated ? Result<Libfabric>(*simulated) : Libfabric::load();
  if (!library) return library.error();
  auto devices = find_devices(*library, options.ofi_provider);
  if (!devices) return devices.error();
  return Found{*library, std::move(*devices)};
}

std::vector<std::string> names_of(const std::vector<Device>& devices, unsigned endpoints) {
  std::vector<std::string> names;
  for (const Device& device : devices) {
    names.push_back(device.name);
    for (unsigned n = 0; n < endpoints; ++n) names.push_back(nic_name(device.name, n));
  }
  return names;
}

bool chosen(const std::vector<std::string>& names, const std::string& device,
            const std::string& nic) {
  return names.empty() || std::any_of(names.begin(), names.end(), [&](const std::string& name) {
           return name == nic || name == device;
         });
}

}  // namespace

bool efa_device_present() {
  std::error_code error;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", error);
  if (error) return false;
  return std::any_of(begin(devices), end(devices), [](const auto& device) {
    std::error_code none;
    const auto driver = std::filesystem::read_symlink(device.path() / "device" / "driver", none);
    return !none && driver.filename() == "efa";
  });
}

Result<OpenedNics> OfiFactory::open(const NicContext& context) {
  const EngineOptions& options = context.options;
  OpenedNics opened;
  const FabricUse use = overrides_.use.value_or(options.ofi);
  if (use == FabricUse::never) return opened;
  const bool required = use == FabricUse::required;
  auto found = look(options, overrides_.library.get());
  if (!found) {
    if (required || found.error().code == Errc::invalid_argument) return found.error();
    // A host without an EFA, or without the library, is not meant to use ofi.
    if (options.ofi_provider == "efa" && efa_device_present() && Libfabric::load()) {
      opened.notices.push_back("ofi cannot be used here: " + found.error().text);
    }
    return opened;
  }
  opened.names = names_of(found->devices, options.tuning.ofi_endpoints);
  auto devices = choose(std::move(found->devices), options.nics);
  if (devices.empty() && required) {
    return Error{Errc::fabric_unavailable,
                 "none of the NICs that were chosen with nics (" + joined(options.nics) +
                     ") is a device of libfabric's provider '" + options.ofi_provider +
                     "'; it has " + joined(opened.names)};
  }
  for (Device& device : devices) {
    const std::string name = device.name;
    const NicInfo info{.network = device.network,
                       .bits_per_second = device.bits_per_second / options.tuning.ofi_endpoints};
    const auto domain = OpenDomain::open(found->library, std::move(device), options.ofi_strict);
    if (!domain && required) return domain.error();
    if (!domain) opened.notices.push_back(domain.error().text);
    for (unsigned number = 0; number < options.tuning.ofi_endpoints && domain; ++number) {
      NicInfo own = info;
      own.name = nic_name(name, number);
      if (!chosen(options.nics, name, own.name)) continue;
      auto nic =
          OfiDomain::open(*domain, context, std::move(own),
                          {.wait_object = overrides_.wait_object, .strict = options.ofi_strict});
      if (nic) {
        opened.nics.push_back(std::move(*nic));
      } else if (required) {
        return nic.error();
      } else {
        opened.notices.push_back(nic.error().text);
      }
    }
  }
  return opened;
}

}  // namespace kvxfer::ofi
