// Which of libfabric's domains can carry writes, and what each of them asks of its user.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fabric/ofi/libfabric.hpp"
#include "kvxfer/types.hpp"

namespace kvxfer::ofi {

struct Device {
  InfoPtr info;
  std::string name;     // of the device: rdmap0s6, lo
  std::string network;  // ofi-efa, ofi-tcp
  std::uint64_t bits_per_second = 0;
  // The NIC itself checks the key of every packet: closing a region's key stops writes at once.
  // Elsewhere software on the receiving side does, once for a write, and may still be placing it.
  bool keys_fence = false;
  // It takes memory of GPUs, as far as libfabric knows.
  bool takes_gpus = false;
  // One ordered connection for both directions of a pair: see flushes.hpp.
  bool ordered = false;

  bool mode(std::uint64_t bit) const { return (info->mode & bit) != 0; }
  bool mr_mode(int bit) const { return (info->domain_attr->mr_mode & bit) != 0; }
};

// Every device of the provider, one domain each; an error where there is none, with its cause.
Result<std::vector<Device>> find_devices(const Libfabric& library, const std::string& provider);

// `names` chooses by name of device or NIC (NAME/0). Empty: all, loopback only where there is no
// other.
std::vector<Device> choose(std::vector<Device> devices, const std::vector<std::string>& names);
std::string nic_name(const std::string& device, unsigned endpoint);

}  // namespace kvxfer::ofi
