// The devices of libfabric (domains) that can carry writes, and their requirements.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fabric/ofi/libfabric.hpp"
#include "kvxfer/types.hpp"

namespace kvxfer::ofi {

struct Device {
  InfoPtr info;
  std::string name;     // the device's: rdmap0s6, lo
  std::string network;  // ofi-efa, ofi-tcp
  std::uint64_t bits_per_second = 0;
  // True if the NIC itself checks the key of every packet, so that closing a region's key stops
  // writes at once. Elsewhere software on the receiving side checks it once for a write, and may
  // still be placing it.
  bool keys_fence = false;
  // True if it takes memory of GPUs, as far as libfabric knows.
  bool takes_gpus = false;
  // True if one ordered connection carries both directions of a pair: see flushes.hpp.
  bool ordered = false;

  bool mode(std::uint64_t bit) const { return (info->mode & bit) != 0; }
  bool mr_mode(int bit) const { return (info->domain_attr->mr_mode & bit) != 0; }
};

// Returns every device of the provider, with one domain each. Fails with the cause if there is
// none.
Result<std::vector<Device>> find_devices(const Libfabric& library, const std::string& provider);

// Keeps the devices that `names` lists, by name of device or NIC (NAME/0). If it is empty, keeps
// all, but loopback only if there is no other.
std::vector<Device> choose(std::vector<Device> devices, const std::vector<std::string>& names);
std::string nic_name(const std::string& device, unsigned endpoint);

}  // namespace kvxfer::ofi
