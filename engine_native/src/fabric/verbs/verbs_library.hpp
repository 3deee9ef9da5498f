// libibverbs, loaded at run time, so that a host without it can run the engine. Functions that the
// headers inline (posting, polling, arming) are not listed here. Any thread.
#pragma once

#include <infiniband/verbs.h>

#include <memory>

#include "kvxfer/error.hpp"

namespace kvxfer::verbs {

// A port's attributes, with room for those that this build's header may lack: rdma-core has
// appended active_speed_ex.
struct PortAttributes {
  // Returns the speed code of a lane. Codes above 128 (XDR is 256) are in active_speed_ex alone.
  std::uint32_t speed() const;

  ibv_port_attr known;
  std::uint32_t room;  // room for active_speed_ex, if the header lacks it
};

struct VerbsLibrary {
  // True if the host has the library.
  static bool installed();
  // Fails with fabric-unavailable.
  static Result<std::shared_ptr<const VerbsLibrary>> load();

  // Replaces the header's ibv_query_port, a wrapper that needs the symbol.
  int query_port(ibv_context* context, std::uint8_t port, PortAttributes& attributes) const;

  // Named as in libibverbs, without the prefix.
  decltype(&::ibv_get_device_list) get_device_list = nullptr;
  decltype(&::ibv_free_device_list) free_device_list = nullptr;
  decltype(&::ibv_open_device) open_device = nullptr;
  decltype(&::ibv_close_device) close_device = nullptr;
  decltype(&::ibv_query_device) query_device = nullptr;
  decltype(&::ibv_query_pkey) query_pkey = nullptr;
  decltype(&::_ibv_query_gid_table) query_gid_table = nullptr;
  decltype(&::ibv_get_async_event) get_async_event = nullptr;
  decltype(&::ibv_ack_async_event) ack_async_event = nullptr;
  decltype(&::ibv_alloc_pd) alloc_pd = nullptr;
  decltype(&::ibv_dealloc_pd) dealloc_pd = nullptr;
  decltype(&::ibv_reg_mr_iova2) reg_mr_iova2 = nullptr;
  decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr = nullptr;  // null before rdma-core 34
  decltype(&::ibv_dereg_mr) dereg_mr = nullptr;
  decltype(&::ibv_create_comp_channel) create_comp_channel = nullptr;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel = nullptr;
  decltype(&::ibv_create_cq) create_cq = nullptr;
  decltype(&::ibv_destroy_cq) destroy_cq = nullptr;
  decltype(&::ibv_get_cq_event) get_cq_event = nullptr;
  decltype(&::ibv_ack_cq_events) ack_cq_events = nullptr;
  decltype(&::ibv_create_srq) create_srq = nullptr;
  decltype(&::ibv_modify_srq) modify_srq = nullptr;
  decltype(&::ibv_destroy_srq) destroy_srq = nullptr;
  decltype(&::ibv_create_qp) create_qp = nullptr;
  decltype(&::ibv_modify_qp) modify_qp = nullptr;
  decltype(&::ibv_destroy_qp) destroy_qp = nullptr;
  decltype(&::ibv_wc_status_str) wc_status_str = nullptr;

 private:
  int (*old_query_port_)(ibv_context*, std::uint8_t, _compat_ibv_port_attr*) = nullptr;
};

}  // namespace kvxfer::verbs
