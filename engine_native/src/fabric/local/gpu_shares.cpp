#include "fabric/local/gpu_shares.hpp"

#include <algorithm>
#include <vector>

#include "cuda/gpu.hpp"
#include "fabric/local/unix_socket.hpp"

namespace kvxfer::local {
namespace {

// Regions that the peer is opening; it takes a few more.
constexpr std::ptrdiff_t kMostAsked = 32;

GpuRegionMessage message_of(const MemoryRegion& region, std::uint32_t number, int reader) {
  return {.head = {.kind = RegionMessage::Kind::share_gpu, .number = number, .size = region.size()},
          .offset = region.ipc_offset(),
          .address = region.address(),
          .device = static_cast<std::uint32_t>(region.gpu()->device()),
          .reader = static_cast<std::uint32_t>(reader),
          .handle = region.ipc_handle().value_or(cuda::IpcHandle{})};
}

}  // namespace

GpuShares::GpuShares(GpuContext context, int socket, bool same_process, std::string peer,
                     std::uint32_t& next_number)
    : context_(std::move(context)),
      socket_(socket),
      same_process_(same_process),
      peer_(std::move(peer)),
      next_number_(next_number) {}

GpuShares::Share GpuShares::find(const MemoryRegion& region, int reader) {
  const Key key{region.key(), reader};
  const auto known = shares_.find(key);
  if (known != shares_.end()) return known->second;
  // Within one process all that a GPU has is at its address.
  const int device = region.gpu()->device();
  const bool with_files = !region.ipc_handle() && !(same_process_ && device == reader);
  const auto asked = std::count_if(shares_.begin(), shares_.end(), [](const auto& share) {
    return share.second.state == State::asked;
  });
  // Files one after the other, as a process may have few.
  if (asked >= (with_files ? 1 : kMostAsked)) return {};
  const Share share{.number = next_number_, .device = device};
  if (!with_files) {
    const auto message = message_of(region, share.number, reader);
    const auto sent = send_message(socket_, message.bytes(), {});
    if (!sent || !*sent) return {};  // a broken socket shows as an event
  }
  ++next_number_;
  shares_.emplace(key, share);
  if (with_files) ask_with_files(region, key);
  return share;
}

// The driver makes the files in the background.
void GpuShares::ask_with_files(const MemoryRegion& region, const Key& key) {
  auto message = message_of(region, shares_.at(key).number, key.second);
  context_.background.run<Result<cuda::FileParts>>(
      [gpu = region.gpu(), address = region.address(), size = region.size()] {
        return gpu->files_of(address, size);
      },
      [this, key, message, self = std::weak_ptr(self_)](Result<cuda::FileParts> files) mutable {
        if (self.expired()) return;
        const auto share = shares_.find(key);
        if (share == shares_.end()) return;  // forgotten meanwhile
        if (!files) return refuse(key, share->second, files.error().text);
        message.offset = files->offset;
        std::string bytes(message.bytes());
        std::vector<int> fds;
        for (const auto& part : files->parts) {
          bytes.append(reinterpret_cast<const char*>(&part.size), sizeof part.size);
          fds.push_back(part.file.get());
        }
        const auto sent = send_message(socket_, bytes, fds);
        if (!sent || !*sent) shares_.erase(share);  // find() begins again
      });
}

void GpuShares::on_answer(const RegionMessage& answer, std::string_view reason) {
  for (auto& [key, share] : shares_) {
    if (share.number != answer.number || share.state != State::asked) continue;
    if (answer.kind == RegionMessage::Kind::refused) return refuse(key, share, reason);
    share.state = State::opened;
    return;
  }
}

// Said once, as it is much slower.
void GpuShares::refuse(const Key& key, Share& share, std::string_view why) {
  share.state = State::refused;
  if (!told_.emplace(share.device, key.second).second) return;
  context_.tell("memory of GPU " + std::to_string(share.device) + " goes to GPU " +
                std::to_string(key.second) + " of " + peer_ +
                " by way of host memory: " + std::string(why));
}

void GpuShares::forget(const MemoryRegion& region) {
  for (auto share = shares_.lower_bound({region.key(), 0});
       share != shares_.end() && share->first.first == region.key(); share = shares_.erase(share)) {
    // If the socket is full the peer keeps its mapping until the path ends.
    const RegionMessage message{
        .kind = RegionMessage::Kind::forget, .number = share->second.number, .size = 0};
    (void)send_message(socket_, message.bytes(), {});
  }
}

}  // namespace kvxfer::local
