#include "fabric/nic/remote_regions.hpp"

#include <algorithm>

#include "fabric/nic/nic_link.hpp"
#include "refusal.hpp"

namespace kvxfer {
namespace {

// The most regions that a peer may send unasked, so that it does not fill this engine's memory.
constexpr std::size_t kMaxUnasked = 1u << 16;

// True if the writes are within the region. The earlier check trusted the descriptor; a NIC breaks
// the path over a write out of bounds.
bool fits(const Operation& operation, const RemoteRegion& region) {
  return operation.destination_length <= region.length ||
         std::all_of(operation.writes.begin(), operation.writes.end(), [&](const WireWrite& write) {
           return write.destination + write.length <= region.length;
         });
}

}  // namespace

void RemoteRegions::resolve(const OperationPtr& operation) {
  thread_.check("RemoteRegions");
  if (operation->bytes == 0) return owner_.queue(operation);
  const std::uint64_t key = operation->destination_key;
  const auto known = regions_.find(key);
  if (known == regions_.end()) {
    auto& waiting = asked_[key];
    if (waiting.empty()) owner_.send_nic_frame(NicFrame::resolve, ByteWriter().put(key).take());
    waiting.push_back(operation);
  } else if (opening(*known->second)) {
    opening_[key].push_back(operation);
  } else {
    give(operation, known->second);
  }
}

void RemoteRegions::give(const OperationPtr& operation,
                         const std::shared_ptr<const RemoteRegion>& region) {
  if (operation->code != Errc::ok) return;
  const auto refuse = [&](Errc code) {
    operations_.fail(operation, code, refusal(code, *operation, label_).text);
  };
  if (region->imm != 0 && operation->imm != region->imm) return refuse(Errc::unknown_region);
  if (!fits(*operation, *region)) return refuse(Errc::out_of_bounds);
  operation->destination = region;
  owner_.queue(operation);
}

bool RemoteRegions::opening(const RemoteRegion& region) const {
  return region.windows.size() < std::min<std::size_t>(region.opening, paths_);
}

void RemoteRegions::give_open(std::uint64_t key) {
  const auto waiting = opening_.find(key);
  const auto region = regions_.find(key);
  if (waiting == opening_.end() || region == regions_.end() || opening(*region->second)) return;
  const std::vector<OperationPtr> operations = std::move(waiting->second);
  opening_.erase(waiting);
  for (const OperationPtr& operation : operations) give(operation, region->second);
}

void RemoteRegions::set_paths(std::size_t paths) {
  thread_.check("RemoteRegions");
  paths_ = paths;
  std::vector<std::uint64_t> keys;
  for (const auto& [key, operations] : opening_) keys.push_back(key);
  for (const std::uint64_t key : keys) give_open(key);
}

void RemoteRegions::forget(std::uint64_t key) {
  thread_.check("RemoteRegions");
  const auto found = regions_.find(key);
  if (found == regions_.end()) return;
  const Imm imm = found->second->imm;
  regions_.erase(found);
  opening_.erase(key);
  if (imm == 0) return;
  if (const auto granted = granted_.find(imm); granted != granted_.end()) {
    std::erase(granted->second, key);
    if (granted->second.empty()) granted_.erase(granted);
  }
  // Operations on a grant may wait for windows that will never open.
  for (const OperationPtr& operation : operations_.with(peer_, imm)) {
    if (operation->destination_key != key) continue;
    operations_.fail(operation, Errc::unknown_region,
                     refusal(Errc::unknown_region, *operation, label_).text);
  }
}

void RemoteRegions::forget_granted(Imm imm) {
  const auto found = granted_.find(imm);
  if (found == granted_.end()) return;
  for (const std::uint64_t key : found->second) {
    regions_.erase(key);
    opening_.erase(key);  // operations failed when the peer revoked the immediate
  }
  granted_.erase(found);
}

void RemoteRegions::forget_path(PathId path) {
  std::erase_if(regions_, [&](const auto& entry) {
    entry.second->windows.erase(path);
    return !entry.second->windowed;
  });
}

bool RemoteRegions::on_region(ByteReader reader) {
  thread_.check("RemoteRegions");
  const auto key = reader.get<std::uint64_t>();
  const auto status = static_cast<Errc>(reader.get<std::uint16_t>());
  auto region = std::make_shared<RemoteRegion>();
  region->length = reader.get<std::uint64_t>();
  region->imm = reader.get<Imm>();
  region->windowed = reader.get<std::uint8_t>() != 0;
  region->opening = reader.get<std::uint32_t>();
  const auto count = reader.get<std::uint16_t>();
  if (count > kMaxNics) return false;
  for (std::uint16_t n = 0; n < count; ++n) {
    RemoteKey& remote = region->keys.emplace_back();
    remote.valid = reader.get<std::uint8_t>() != 0;
    remote.address = reader.get<std::uint64_t>();
    remote.rkey = reader.get<std::uint64_t>();
  }
  if (!reader.finished()) return false;
  const auto asked = asked_.find(key);
  std::vector<OperationPtr> waiting;
  if (asked != asked_.end()) {
    waiting = std::move(asked->second);
    asked_.erase(asked);
  } else if (regions_.size() >= kMaxUnasked) {
    return true;
  }
  if (status == Errc::ok) {
    const auto [known, added] = regions_.try_emplace(key, region);
    if (!added) {
      if (known->second->imm != region->imm) return false;
      region->windows = std::move(known->second->windows);
      *known->second = *region;  // operations hold it, and see the windows that open later
    } else if (region->imm != 0) {
      granted_[region->imm].push_back(key);
    }
  } else if (auto opening = opening_.extract(key)) {
    // The windows that these wait for will not open.
    waiting.insert(waiting.end(), opening.mapped().begin(), opening.mapped().end());
  }
  give_open(key);
  for (const OperationPtr& operation : waiting) {
    if (operation->code != Errc::ok) continue;
    if (status == Errc::ok) {
      resolve(operation);
    } else {
      operations_.fail(operation, status, refusal(status, *operation, label_).text);
    }
  }
  return true;
}

bool RemoteRegions::on_window(ByteReader reader, const std::function<bool(PathId)>& exists) {
  const auto key = reader.get<std::uint64_t>();
  const auto path = reader.get<PathId>();
  const auto address = reader.get<std::uint64_t>();
  const auto rkey = reader.get<std::uint64_t>();
  if (!reader.finished()) return false;
  const auto found = regions_.find(key);
  if (found == regions_.end() || !exists(path)) return true;
  found->second->windows[path] = {.address = address, .rkey = rkey, .valid = true};
  give_open(key);
  return true;
}

}  // namespace kvxfer
