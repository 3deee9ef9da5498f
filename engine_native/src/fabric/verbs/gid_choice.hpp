// Which of a port's addresses (GIDs) and partitions (P_Keys) its paths use.
#pragma once

#include <infiniband/verbs.h>

#include <functional>
#include <optional>
#include <span>
#include <string>

namespace kvxfer::verbs {

// The one of this index; where that is -1, of InfiniBand the first, of Ethernet one of this network
// namespace, routable (RoCE v2), IPv4, in this order of weight.
std::optional<ibv_gid_entry> choose_gid(std::span<const ibv_gid_entry> entries,
                                        std::uint8_t link_layer, int index,
                                        const std::function<bool(const ibv_gid_entry&)>& is_ours);

// The index of this partition, whatever its membership bit; where it is 0, of the first in which
// the port is a full member, else of the first at all. Index 0 may be a partition that only
// management uses.
std::optional<std::uint16_t> choose_pkey(std::span<const std::uint16_t> keys,
                                         std::uint16_t partition);
// Two limited members of a partition do not hear each other.
inline constexpr std::uint16_t kFullMember = 0x8000;
inline constexpr std::uint16_t kDefaultPartition = 0x7fff;

// Whether the entry's network interface is one of this network namespace: a container that shares
// a device sees the GIDs of its host and of its neighbours too, and the kernel lets it use none.
bool is_of_this_namespace(const std::string& device, const ibv_gid_entry& entry);

std::string gid_text(const ibv_gid& gid);

}  // namespace kvxfer::verbs
