#include "fabric/verbs/verbs_device.hpp"

#include <unistd.h>

#include <algorithm>

#include "errno_text.hpp"
#include "fabric/verbs/gid_choice.hpp"

namespace kvxfer::verbs {
namespace {

// Where the device does not say, e.g. while its link is down.
constexpr std::uint64_t kUnknownSpeed = 10'000'000'000u;

// Of one lane, in Mbit/s; bits of the port attributes' active_speed.
std::uint64_t lane_speed(std::uint8_t active_speed) {
  switch (active_speed) {
    case 1:
      return 2'500;
    case 2:
      return 5'000;
    case 4:
    case 8:
      return 10'000;
    case 16:
      return 14'000;
    case 32:
      return 25'000;
    case 64:
      return 50'000;
    case 128:
      return 100'000;
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

}  // namespace

Result<std::shared_ptr<const VerbsDevice>> VerbsDevice::open(
    std::shared_ptr<const VerbsLibrary> library, ibv_device* device) {
  const std::string name = device->name;
  const auto failed = [&](const std::string& what, const std::string& remedy) {
    return Error{Errc::fabric_unavailable,
                 "NIC " + name + ": " + what + ": " + errno_text() + "; " + remedy};
  };
  errno = 0;
  ibv_context* const context = library->open_device(device);
  if (!context) {
    const std::string path = "/dev/infiniband/" + std::string(device->dev_name);
    const int error = errno;  // of the last way that the library tried; this one is the first
    if (::access(path.c_str(), R_OK | W_OK) == 0) errno = error;
    return failed(path + " cannot be opened",
                  "give this user (group rdma) or container access to /dev/infiniband");
  }
  std::shared_ptr<VerbsDevice> opened(new VerbsDevice(std::move(library), context, name));
  errno = opened->library_->query_device(context, &opened->limits_);
  if (errno != 0) return failed("its limits cannot be read", "look into the kernel's log");
  opened->pd_ = opened->library_->alloc_pd(context);
  if (!opened->pd_) return failed("no protection domain", "look into the kernel's log");
  return std::shared_ptr<const VerbsDevice>(std::move(opened));
}

VerbsDevice::~VerbsDevice() {
  if (pd_) library_->dealloc_pd(pd_);
  library_->close_device(context_);
}

Result<Port> VerbsDevice::query_port() const {
  ibv_port_attr attributes;
  if (const int error = library_->query_port(context_, kPort, attributes); error != 0) {
    return Error{Errc::nic_lost,
                 "NIC " + name_ + ": its port cannot be queried: " + errno_text(error)};
  }
  Port port{.link_layer = attributes.link_layer,
            .mtu = static_cast<std::uint8_t>(attributes.active_mtu),
            .lid = attributes.lid};
  const std::uint64_t speed =
      lane_speed(attributes.active_speed) * lane_count(attributes.active_width) * 1'000'000u;
  port.bits_per_second = speed > 0 ? speed : kUnknownSpeed;
  const auto gid =
      choose_gid(query_gids(attributes), attributes.link_layer,
                 [this](const ibv_gid_entry& entry) { return is_of_this_namespace(name_, entry); });
  if (gid) {
    port.gid_index = gid->gid_index;
    port.gid = gid->gid;
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
  std::erase_if(entries, [](const ibv_gid_entry& entry) {
    return entry.port_num != kPort || entry.gid_index > UINT8_MAX;  // all that a path can name
  });
  return entries;
}

}  // namespace kvxfer::verbs
