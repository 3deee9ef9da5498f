#include "fabric/nic/nic_grants.hpp"

#include "fabric/nic/nic_link.hpp"

namespace kvxfer {

void send_region(NicLinkOwner& owner, std::uint64_t key, Errc status, const RemoteRegion& region) {
  ByteWriter writer;
  writer.put(key).put(static_cast<std::uint16_t>(status)).put(region.length).put(region.imm);
  writer.put(static_cast<std::uint8_t>(region.windowed)).put(region.opening);
  writer.put(static_cast<std::uint16_t>(region.keys.size()));
  for (const RemoteKey& remote : region.keys) {
    writer.put(static_cast<std::uint8_t>(remote.valid)).put(remote.address).put(remote.rkey);
  }
  owner.send_nic_frame(NicFrame::region, writer.take());
}

namespace {

// True if the NIC of the path has the region's key; if not, its paths have windows.
bool has_key(const RemoteRegion& keys, const NicPath& path) {
  const std::uint32_t nic = path.identity().nic;
  return nic < keys.keys.size() && keys.keys[nic].valid;
}

}  // namespace

void NicGrants::add(const RegionPtr& grant, RemoteRegion keys, std::span<NicPath* const> paths) {
  thread_.check("NicGrants");
  const bool known = open_.contains(grant->key());
  std::vector<const NicPath*> open;
  bool reached = false;
  if (keys.windowed) {
    for (NicPath* const path : paths) {
      reached = reached || has_key(keys, *path);
      if (has_key(keys, *path)) continue;
      if (known && path->window(grant->key())) open.push_back(path);
      // Windows that open later are sent by on_window().
      if (path->open_window(*grant)) ++keys.opening;
    }
  }
  open_.insert_or_assign(grant->key(), Open{grant, keys});
  const bool none = keys.windowed && keys.opening == 0 && !reached && !paths.empty();
  send_region(owner_, grant->key(), none ? Errc::out_of_memory : Errc::ok, keys);
  for (const NicPath* const path : open) send_window(*path, grant->key());
}

void NicGrants::open_on(NicPath& path) {
  thread_.check("NicGrants");
  for (auto& [key, open] : open_) {
    if (!open.keys.windowed || has_key(open.keys, path)) continue;
    if (!path.open_window(*open.grant)) expect_no_window(key, open);
  }
}

void NicGrants::on_window(const NicPath& path, std::uint64_t key) {
  thread_.check("NicGrants");
  const auto found = open_.find(key);
  if (found == open_.end()) return;
  path.window(key) ? send_window(path, key) : expect_no_window(key, found->second);
}

// Tells the peer not to wait for a window that cannot be opened.
void NicGrants::expect_no_window(std::uint64_t key, Open& open) {
  if (open.keys.opening == 0) return;
  --open.keys.opening;
  send_region(owner_, key, open.keys.opening == 0 ? Errc::out_of_memory : Errc::ok, open.keys);
}

void NicGrants::send_window(const NicPath& path, std::uint64_t key) {
  const auto window = path.window(key);
  if (!window) return;
  owner_.send_nic_frame(
      NicFrame::window,
      ByteWriter().put(key).put(path.identity().id).put(window->address).put(window->rkey).take());
}

void NicGrants::close(std::span<const RegionPtr> grants, std::span<NicPath* const> paths) {
  thread_.check("NicGrants");
  for (const RegionPtr& grant : grants) {
    if (open_.erase(grant->key()) == 0) continue;
    for (NicPath* const path : paths) path->close_window(grant->key());
  }
}

}  // namespace kvxfer
