// Which of a port's addresses (GIDs) its paths use.
#pragma once

#include <infiniband/verbs.h>

#include <functional>
#include <optional>
#include <span>
#include <string>

namespace kvxfer::verbs {

// InfiniBand: the first. Ethernet: one of this network namespace, routable (RoCE v2), IPv4, in
// this order of weight.
std::optional<ibv_gid_entry> choose_gid(std::span<const ibv_gid_entry> entries,
                                        std::uint8_t link_layer,
                                        const std::function<bool(const ibv_gid_entry&)>& is_ours);

// Whether the entry's network interface is one of this network namespace: a container that shares
// a device sees the GIDs of its host and of its neighbours too, and the kernel lets it use none.
bool is_of_this_namespace(const std::string& device, const ibv_gid_entry& entry);

std::string gid_text(const ibv_gid& gid);

}  // namespace kvxfer::verbs
