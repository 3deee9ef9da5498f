// An open RDMA device and its protection domain, shared by everything created from it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fabric/verbs/verbs_library.hpp"
#include "kvxfer/error.hpp"

namespace kvxfer::verbs {

// The port of a device to use, and the settings that the device does not choose.
struct PortChoice {
  std::string name;  // the NIC's, as users write it: DEVICE or DEVICE:PORT
  std::uint8_t number = 1;
  int gid_index = -1;      // -1: see choose_gid
  std::uint16_t pkey = 0;  // 0: see choose_pkey
  unsigned mtu_bytes = 0;  // 0: the port's
};

// The port of our end of a path, as it is now.
struct Port {
  bool active = false;  // the link is up and has an address
  std::uint8_t number = 1;
  std::uint16_t pkey = 0;  // on InfiniBand, with its membership bit
  std::uint16_t pkey_index = 0;
  bool needs_grh = false;
  std::uint64_t bits_per_second = 0;
  std::uint8_t link_layer = 0;  // IBV_LINK_LAYER_...
  std::uint8_t mtu = 0;         // enum ibv_mtu
  std::uint16_t lid = 0;
  std::uint32_t gid_index = 0;
  ibv_gid gid{};
};

class VerbsDevice {
 public:
  static Result<std::shared_ptr<const VerbsDevice>> open(
      std::shared_ptr<const VerbsLibrary> library, ibv_device* device, PortChoice choice);
  ~VerbsDevice();
  VerbsDevice(const VerbsDevice&) = delete;
  VerbsDevice& operator=(const VerbsDevice&) = delete;

  const VerbsLibrary& library() const { return *library_; }
  ibv_context* context() const { return context_; }
  ibv_pd* pd() const { return pd_; }
  const std::string& name() const { return choice_.name; }
  std::uint8_t port() const { return choice_.number; }
  const ibv_device_attr& limits() const { return limits_; }
  // True if the device has memory windows that requests of a queue pair open, valid for that queue
  // pair alone.
  bool has_windows() const {
    return (limits_.device_cap_flags &
            (IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B)) != 0;
  }

  Result<Port> query_port() const;

 private:
  VerbsDevice(std::shared_ptr<const VerbsLibrary> library, ibv_context* context, PortChoice choice)
      : library_(std::move(library)), context_(context), choice_(std::move(choice)) {}
  std::vector<ibv_gid_entry> query_gids(const ibv_port_attr& attributes) const;
  std::vector<std::uint16_t> query_pkeys(const ibv_port_attr& attributes) const;

  std::shared_ptr<const VerbsLibrary> library_;
  ibv_context* context_;
  ibv_pd* pd_ = nullptr;
  PortChoice choice_;
  ibv_device_attr limits_{};
};

}  // namespace kvxfer::verbs
