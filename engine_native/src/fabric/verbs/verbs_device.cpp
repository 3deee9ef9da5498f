#include "fabric/verbs/verbs_device.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>

#include "error_text.hpp"
#include "fabric/verbs/gid_choice.hpp"

namespace kvxfer::verbs {
namespace {

// Assumed if the device reports no speed, e.g. while its link is down.
constexpr std::uint64_t kUnknownSpeed = 10'000'000'000u;

// Returns the speed of one lane in Mbit/s for the port's speed code (IBTA, PortInfo's LinkSpeed
// components).
std::uint64_t lane_speed(std::uint32_t code) {
  switch (code) {
    case 1:  // SDR
      return 2'500;
    case 2:  // DDR
      return 5'000;
    case 4:  // QDR
    case 8:  // FDR10
      return 10'000;
    case 16:  // FDR
      return 14'000;
    case 32:  // EDR
      return 25'000;
    case 64:  // HDR
      return 50'000;
    case 128:  // NDR
      return 100'000;
    case 256:  // XDR
      return 200'000;
    default:
      return 0;
  }
}

std::uint64_t lane_count(std::uint8_t active_width) {
  switch (active_width) {
    case 1:
      return 1;
    case 16:
      return 2;
    case 2:
      return 4;
    case 4:
      return 8;
    case 8:
      return 12;
    default:
      return 0;
  }
}

// Returns the largest enum ibv_mtu that is no more than `bytes`.
std::uint8_t mtu_of_bytes(unsigned bytes) {
  return static_cast<std::uint8_t>(std::bit_width(std::clamp(bytes, 256u, 4096u)) - 8);
}

std::string hex(std::uint16_t key) {
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), "0x%04x", key);
  return text.data();
}

std::string listed(const std::vector<std::uint16_t>& keys) {
  std::vector<std::string> texts;
  for (const std::uint16_t key : keys) {
    if (key != 0) texts.push_back(hex(key));
  }
  return joined(texts);
}

}  // namespace

Result<std::shared_ptr<const VerbsDevice>> VerbsDevice::open(
    std::shared_ptr<const VerbsLibrary> library, ibv_device* device, PortChoice choice) {
  const std::string name = choice.name;
  const auto failed = [&](const std::string& what, const std::string& remedy) {
    return Error{Errc::fabric_unavailable,
                 "NIC " + name + ": " + what + ": " + errno_text() + "; " + remedy};
  };
  errno = 0;
  ibv_context* const context = library->open_device(device);
  if (!context) {
    const std::string path = "/dev/infiniband/" + std::string(device->dev_name);
    const int error = errno;  // the library's last attempt set it; this path is its first
    if (::access(path.c_str(), R_OK | W_OK) == 0) errno = error;
    return failed(path + " cannot be opened",
                  "give this user (group rdma) or container access to /dev/infiniband");
  }
  std::shared_ptr<VerbsDevice> opened(
      new VerbsDevice(std::move(library), context, std::move(choice)));
  errno = opened->library_->query_device(context, &opened->limits_);
  if (errno != 0) return failed("its limits cannot be read", "look into the kernel's log");
  if (opened->port() > opened->limits_.phys_port_cnt) {
    return Error{Errc::fabric_unavailable, "nics names " + name + ", but the device has " +
                                               std::to_string(opened->limits_.phys_port_cnt) +
                                               " port(s)"};
  }
  opened->pd_ = opened->library_->alloc_pd(context);
  if (!opened->pd_) return failed("no protection domain", "look into the kernel's log");
  return std::shared_ptr<const VerbsDevice>(std::move(opened));
}

VerbsDevice::~VerbsDevice() {
  if (pd_) library_->dealloc_pd(pd_);
  library_->close_device(context_);
}

Result<Port> VerbsDevice::query_port() const {
  PortAttributes all;
  if (const int error = library_->query_port(context_, choice_.number, all); error != 0) {
    return Error{Errc::nic_lost,
                 "NIC " + name() + ": its port cannot be queried: " + errno_text(error)};
  }
  const ibv_port_attr& attributes = all.known;
  Port port{.number = choice_.number,
            .needs_grh = (attributes.flags & IBV_QPF_GRH_REQUIRED) != 0,
            .link_layer = attributes.link_layer,
            .mtu = static_cast<std::uint8_t>(attributes.active_mtu),
            .lid = attributes.lid};
  if (choice_.mtu_bytes > 0) port.mtu = std::min(port.mtu, mtu_of_bytes(choice_.mtu_bytes));
  const std::uint64_t speed =
      lane_speed(all.speed()) * lane_count(attributes.active_width) * 1'000'000u;
  port.bits_per_second = speed > 0 ? speed : kUnknownSpeed;
  const auto gids = query_gids(attributes);
  const auto gid = choose_gid(gids, attributes.link_layer, choice_.gid_index,
                              [this](const ibv_gid_entry& entry) {
                                return is_of_this_namespace(context_->device->name, entry);
                              });
  if (!gid && !gids.empty()) {
    return Error{Errc::invalid_argument,
                 "gid_index is " + std::to_string(choice_.gid_index) + ", but port " +
                     std::to_string(choice_.number) + " of NIC " + name() +
                     " has no GID there; leave gid_index out, or see kvxfer doctor --probe"};
  }
  if (gid) {
    port.gid_index = gid->gid_index;
    port.gid = gid->gid;
  }
  const auto pkeys = query_pkeys(attributes);
  const auto pkey_index = choose_pkey(pkeys, choice_.pkey);
  if (!pkey_index && !pkeys.empty()) {
    return Error{Errc::invalid_argument, "pkey is " + hex(choice_.pkey) + ", but NIC " + name() +
                                             " is no member of that partition, only of " +
                                             listed(pkeys) + "; choose one, or leave pkey out"};
  }
  if (pkey_index) {
    port.pkey_index = *pkey_index;
    port.pkey = pkeys[*pkey_index];
  }
  port.active = attributes.state == IBV_PORT_ACTIVE && gid;
  return port;
}

std::vector<ibv_gid_entry> VerbsDevice::query_gids(const ibv_port_attr& attributes) const {
  // The table holds the entries of all ports.
  std::vector<ibv_gid_entry> entries(static_cast<std::size_t>(std::max(attributes.gid_tbl_len, 1)) *
                                     std::max<std::size_t>(limits_.phys_port_cnt, 1));
  const ssize_t count =
      library_->query_gid_table(context_, entries.data(), entries.size(), 0, sizeof(ibv_gid_entry));
  entries.resize(count < 0 ? 0 : static_cast<std::size_t>(count));
  std::erase_if(entries, [this](const ibv_gid_entry& entry) {
    // Keeps the entries of this port whose index a path can name.
    return entry.port_num != choice_.number || entry.gid_index > UINT8_MAX;
  });
  return entries;
}

std::vector<std::uint16_t> VerbsDevice::query_pkeys(const ibv_port_attr& attributes) const {
  std::vector<std::uint16_t> keys;
  for (int index = 0; index < attributes.pkey_tbl_len; ++index) {
    __be16 key = 0;
    if (library_->query_pkey(context_, choice_.number, index, &key) != 0) break;
    keys.push_back(be16toh(key));
  }
  return keys;
}

}  // namespace kvxfer::verbs
