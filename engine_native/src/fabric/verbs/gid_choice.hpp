// The choice of a port's address (GID) and partition (P_Key) for its paths.
#pragma once

#include <infiniband/verbs.h>

#include <functional>
#include <optional>
#include <span>
#include <string>

namespace kvxfer::verbs {

// Returns the entry with this index. If the index is -1, returns the first entry on InfiniBand; on
// Ethernet it prefers entries of this network namespace, then RoCE v2 (routable), then IPv4, then
// addresses that are not link-local.
std::optional<ibv_gid_entry> choose_gid(std::span<const ibv_gid_entry> entries,
                                        std::uint8_t link_layer, int index,
                                        const std::function<bool(const ibv_gid_entry&)>& is_ours);

// Returns the index of this partition, with either membership bit. If `partition` is 0, returns the
// first index where the port is a full member, else the first that has a key. Index 0 may be a
// partition that only management uses.
std::optional<std::uint16_t> choose_pkey(std::span<const std::uint16_t> keys,
                                         std::uint16_t partition);
// Set in the P_Key of a full member. Two limited members of a partition cannot communicate.
inline constexpr std::uint16_t kFullMember = 0x8000;
inline constexpr std::uint16_t kDefaultPartition = 0x7fff;

// True if the entry's network interface is in this network namespace. A container that shares a
// device also sees the GIDs of its host and its neighbours, but the kernel lets it use none of
// them.
bool is_of_this_namespace(const std::string& device, const ibv_gid_entry& entry);

std::string gid_text(const ibv_gid& gid);

}  // namespace kvxfer::verbs
