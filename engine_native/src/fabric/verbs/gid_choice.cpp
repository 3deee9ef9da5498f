#include "fabric/verbs/gid_choice.hpp"

#include <arpa/inet.h>
#include <net/if.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>

namespace kvxfer::verbs {
namespace {

bool is_ipv4(const ibv_gid& gid) {
  constexpr std::array<std::uint8_t, 12> kMapped{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, kMapped.data(), kMapped.size()) == 0;
}

bool is_link_local(const ibv_gid& gid) { return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80; }

}  // namespace

std::optional<ibv_gid_entry> choose_gid(std::span<const ibv_gid_entry> entries,
                                        std::uint8_t link_layer, int index,
                                        const std::function<bool(const ibv_gid_entry&)>& is_ours) {
  if (entries.empty()) return std::nullopt;
  if (index >= 0) {
    const auto found =
        std::ranges::find(entries, static_cast<std::uint32_t>(index), &ibv_gid_entry::gid_index);
    return found == entries.end() ? std::nullopt : std::optional(*found);
  }
  if (link_layer != IBV_LINK_LAYER_ETHERNET) return entries.front();
  const auto weight = [&](const ibv_gid_entry& entry) {
    return 8 * is_ours(entry) + 4 * (entry.gid_type == IBV_GID_TYPE_ROCE_V2) +
           2 * is_ipv4(entry.gid) + !is_link_local(entry.gid);
  };
  return *std::max_element(entries.begin(), entries.end(),
                           [&](const auto& a, const auto& b) { return weight(a) < weight(b); });
}

std::optional<std::uint16_t> choose_pkey(std::span<const std::uint16_t> keys,
                                         std::uint16_t partition) {
  const auto first = [&](auto wanted) -> std::optional<std::uint16_t> {
    const auto found = std::ranges::find_if(keys, wanted);
    if (found == keys.end()) return std::nullopt;
    return static_cast<std::uint16_t>(found - keys.begin());
  };
  const auto is_partition = [&](std::uint16_t key) {
    return (key & ~kFullMember) == (partition & ~kFullMember);
  };
  if (partition != 0) return first(is_partition);
  const auto full = first([](std::uint16_t key) { return (key & kFullMember) != 0; });
  return full ? full : first([](std::uint16_t key) { return key != 0; });
}

bool is_of_this_namespace(const std::string& device, const ibv_gid_entry& entry) {
  std::string name;
  std::ifstream("/sys/class/infiniband/" + device + "/ports/" + std::to_string(entry.port_num) +
                "/gid_attrs/ndevs/" + std::to_string(entry.gid_index)) >>
      name;
  // An interface of another namespace may have the same name or the same number, but hardly both.
  return ::if_nametoindex(name.c_str()) == entry.ndev_ifindex;
}

std::string gid_text(const ibv_gid& gid) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  ::inet_ntop(AF_INET6, gid.raw, text.data(), text.size());
  return text.data();
}

}  // namespace kvxfer::verbs
