#include "fabric/nic/remote_regions.hpp"

#include <algorithm>

#include "fabric/nic/nic_link.hpp"
#include "refusal.hpp"

namespace kvxfer {
namespace {

// What a peer may tell unasked: it must not fill this engine's memory.
constexpr std::size_t kMaxUnasked = 1u << 18;

// Our own check believed the descriptor; the NIC would break the path over it.
bool fits(const Operation& operation, const RemoteRegion& region) {
  return operation.destination_length <= region.length ||
         std::all_of(operation.writes.begin(), operation.writes.end(), [&](const WireWrite& write) {
           return write.destination + write.length <= region.length;
         });
}

}  // namespace

void RemoteRegions::resolve(const OperationPtr& operation, bool any_path) {
  if (operation->bytes == 0) return owner_.queue(operation);
  const std::uint64_t key = operation->destination_key;
  const auto known = regions_.find(key);
  if (known == regions_.end()) {
    auto& waiting = asked_[key];
    if (waiting.empty()) owner_.send_nic_frame(NicFrame::resolve, ByteWriter().put(key).take());
    waiting.push_back(operation);
  } else if (known->second->windows.size() < known->second->opening && any_path) {
    opening_[key].push_back(operation);
  } else {
    give(operation, known->second);
  }
}

void RemoteRegions::give(const OperationPtr& operation,
                         const std::shared_ptr<const RemoteRegion>& region) {
  if (operation->code != Errc::ok) return;
  const auto refuse = [&](Errc code) {
    owner_.fail(operation, code, refusal(code, *operation, label_).text);
  };
  if (region->imm != 0 && operation->imm != region->imm) return refuse(Errc::unknown_region);
  if (!fits(*operation, *region)) return refuse(Errc::out_of_bounds);
  operation->destination = region;
  owner_.queue(operation);
}

void RemoteRegions::give_all(Waiting& waiting, std::uint64_t key) {
  const auto found = waiting.find(key);
  const auto region = regions_.find(key);
  if (found == waiting.end() || region == regions_.end()) return;
  const std::vector<OperationPtr> operations = std::move(found->second);
  waiting.erase(found);
  for (const OperationPtr& operation : operations) give(operation, region->second);
}

void RemoteRegions::await_no_window() {
  std::vector<std::uint64_t> keys;
  for (const auto& [key, operations] : opening_) keys.push_back(key);
  for (const std::uint64_t key : keys) give_all(opening_, key);
}

void RemoteRegions::forget(std::uint64_t key) {
  const auto found = regions_.find(key);
  if (found == regions_.end()) return;
  const Imm imm = found->second->imm;
  regions_.erase(found);
  opening_.erase(key);
  if (imm == 0) return;
  // Operations on a grant may wait for windows that will never open.
  for (const OperationPtr& operation : owner_.operations_with(imm)) {
    if (operation->destination_key != key) continue;
    owner_.fail(operation, Errc::unknown_region,
                refusal(Errc::unknown_region, *operation, label_).text);
  }
}

void RemoteRegions::forget_granted(Imm imm) {
  const auto found = granted_.find(imm);
  if (found == granted_.end()) return;
  for (const std::uint64_t key : found->second) {
    regions_.erase(key);
    opening_.erase(key);  // the peer revoked the immediate: these have failed
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
    auto& known = regions_.try_emplace(key, std::make_shared<RemoteRegion>()).first->second;
    region->windows = std::move(known->windows);
    *known = *region;  // operations hold it, and see the windows that open later
    if (region->imm != 0) granted_[region->imm].push_back(key);
  }
  for (const OperationPtr& operation : waiting) {
    if (operation->code != Errc::ok) continue;
    if (status == Errc::ok) {
      resolve(operation, true);
    } else {
      owner_.fail(operation, status, refusal(status, *operation, label_).text);
    }
  }
  return true;
}

bool RemoteRegions::on_window(ByteReader reader) {
  const auto key = reader.get<std::uint64_t>();
  const auto path = reader.get<PathId>();
  const auto address = reader.get<std::uint64_t>();
  const auto rkey = reader.get<std::uint64_t>();
  if (!reader.finished()) return false;
  const auto found = regions_.find(key);
  if (found == regions_.end()) return true;
  // One for each path: a peer cannot fill this engine's memory with windows.
  if (found->second->windows.size() >= kMaxNics * kMaxNics) return true;
  found->second->windows[path] = {.address = address, .rkey = rkey, .valid = true};
  if (found->second->windows.size() >= found->second->opening) give_all(opening_, key);
  return true;
}

}  // namespace kvxfer
