// An open RDMA device and its protection domain, shared by everything made of it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fabric/verbs/verbs_library.hpp"
#include "kvxfer/error.hpp"

namespace kvxfer::verbs {

inline constexpr std::uint8_t kPort = 1;  // of every device

// What our own end of a path is, as its port is now.
struct Port {
  bool active = false;  // the link is up and has an address
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
      std::shared_ptr<const VerbsLibrary> library, ibv_device* device);
  ~VerbsDevice();
  VerbsDevice(const VerbsDevice&) = delete;
  VerbsDevice& operator=(const VerbsDevice&) = delete;

  const VerbsLibrary& library() const { return *library_; }
  ibv_context* context() const { return context_; }
  ibv_pd* pd() const { return pd_; }
  const std::string& name() const { return name_; }
  const ibv_device_attr& limits() const { return limits_; }
  // Memory windows that are opened by requests of a queue pair, and good for it alone.
  bool has_windows() const {
    return (limits_.device_cap_flags &
            (IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B)) != 0;
  }

  Result<Port> query_port() const;

 private:
  VerbsDevice(std::shared_ptr<const VerbsLibrary> library, ibv_context* context, std::string name)
      : library_(std::move(library)), context_(context), name_(std::move(name)) {}
  std::vector<ibv_gid_entry> query_gids(const ibv_port_attr& attributes) const;

  std::shared_ptr<const VerbsLibrary> library_;
  ibv_context* context_;
  ibv_pd* pd_ = nullptr;
  std::string name_;
  ibv_device_attr limits_{};
};

}  // namespace kvxfer::verbs
