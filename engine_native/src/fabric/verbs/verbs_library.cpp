#include "fabric/verbs/verbs_library.hpp"

#include <dlfcn.h>

#include <cstring>
#include <string>

namespace kvxfer::verbs {
namespace {

constexpr const char* kName = "libibverbs.so.1";

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

// Never unloaded: its providers may keep their own state.
void* open_library() { return ::dlopen(kName, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE); }

}  // namespace

bool VerbsLibrary::installed() { return open_library() != nullptr; }

Result<std::shared_ptr<const VerbsLibrary>> VerbsLibrary::load() {
  void* const library = open_library();
  if (!library) {
    return Error{Errc::fabric_unavailable, std::string(kName) +
                                               " cannot be loaded; install libibverbs1 and "
                                               "ibverbs-providers (rdma-core)"};
  }
  auto verbs = std::make_shared<VerbsLibrary>();
  const bool complete = find(library, "ibv_get_device_list", verbs->get_device_list) &&
                        find(library, "ibv_free_device_list", verbs->free_device_list) &&
                        find(library, "ibv_open_device", verbs->open_device) &&
                        find(library, "ibv_close_device", verbs->close_device) &&
                        find(library, "ibv_query_device", verbs->query_device) &&
                        find(library, "ibv_query_port", verbs->old_query_port_) &&
                        find(library, "ibv_query_pkey", verbs->query_pkey) &&
                        find(library, "_ibv_query_gid_table", verbs->query_gid_table) &&
                        find(library, "ibv_get_async_event", verbs->get_async_event) &&
                        find(library, "ibv_ack_async_event", verbs->ack_async_event) &&
                        find(library, "ibv_alloc_pd", verbs->alloc_pd) &&
                        find(library, "ibv_dealloc_pd", verbs->dealloc_pd) &&
                        find(library, "ibv_reg_mr_iova2", verbs->reg_mr_iova2) &&
                        find(library, "ibv_dereg_mr", verbs->dereg_mr) &&
                        find(library, "ibv_create_comp_channel", verbs->create_comp_channel) &&
                        find(library, "ibv_destroy_comp_channel", verbs->destroy_comp_channel) &&
                        find(library, "ibv_create_cq", verbs->create_cq) &&
                        find(library, "ibv_destroy_cq", verbs->destroy_cq) &&
                        find(library, "ibv_get_cq_event", verbs->get_cq_event) &&
                        find(library, "ibv_ack_cq_events", verbs->ack_cq_events) &&
                        find(library, "ibv_create_srq", verbs->create_srq) &&
                        find(library, "ibv_modify_srq", verbs->modify_srq) &&
                        find(library, "ibv_destroy_srq", verbs->destroy_srq) &&
                        find(library, "ibv_create_qp", verbs->create_qp) &&
                        find(library, "ibv_modify_qp", verbs->modify_qp) &&
                        find(library, "ibv_destroy_qp", verbs->destroy_qp) &&
                        find(library, "ibv_wc_status_str", verbs->wc_status_str);
  if (!complete) {
    return Error{Errc::fabric_unavailable,
                 std::string(kName) + " of this host is too old; rdma-core 32 or later is needed"};
  }
  find(library, "ibv_reg_dmabuf_mr", verbs->reg_dmabuf_mr);
  return std::shared_ptr<const VerbsLibrary>(std::move(verbs));
}

std::uint32_t PortAttributes::speed() const {
  constexpr std::size_t kSpeedEx = 52;  // offset of active_speed_ex
  static_assert(offsetof(ibv_port_attr, port_cap_flags2) == kSpeedEx - 4);
  static_assert(sizeof(PortAttributes) >= kSpeedEx + sizeof(std::uint32_t));
  std::uint32_t extended = 0;
  std::memcpy(&extended, reinterpret_cast<const std::byte*>(this) + kSpeedEx, sizeof extended);
  return extended != 0 ? extended : known.active_speed;
}

int VerbsLibrary::query_port(ibv_context* context, std::uint8_t port,
                             PortAttributes& attributes) const {
  std::memset(&attributes, 0, sizeof attributes);
  if (verbs_context* const extended = verbs_get_ctx_op(context, query_port)) {
    return extended->query_port(context, port, &attributes.known, sizeof attributes);
  }
  return old_query_port_(context, port,
                         reinterpret_cast<_compat_ibv_port_attr*>(&attributes.known));
}

}  // namespace kvxfer::verbs
