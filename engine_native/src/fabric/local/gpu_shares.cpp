#include "fabric/local/gpu_shares.hpp"

#include "clock.hpp"
#include "cuda/gpu.hpp"
#include "fabric/local/unix_socket.hpp"

namespace kvxfer::local {
namespace {

// That the peer is opening; it takes a few more.
constexpr std::size_t kMostUnanswered = 32;
constexpr std::uint64_t kPatienceNs = 500'000'000;

GpuRegionMessage message_of(const MemoryRegion& region, std::uint32_t number, int reader) {
  return {.head = {.kind = RegionMessage::Kind::share_gpu, .number = number, .size = region.size()},
          .offset = region.ipc_offset(),
          .address = region.address(),
          .reader = static_cast<std::uint64_t>(reader),
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
  const int device = region.gpu()->device();
  if (const auto known = shares_.find(key); known != shares_.end()) {
    Share share = known->second;
    if (share.state == State::asked && now_ns() - share.asked_ns > kPatienceNs) {
      share.state = State::refused;  // until it is open
      tell(device, reader, "opening it there takes long", true);
    }
    return share;
  }
  if (shares_.size() >= kMostGpuRegions) {
    tell(device, reader, "the peer has too many regions open");
    return {.state = State::refused};
  }
  // Within one process, all that a GPU has is at its address; other GPUs might read it when it has
  // been freed.
  const bool with_files = same_process_ ? device != reader : !region.ipc_handle();
  // Files one after the other, as a process may have few.
  if (unanswered_ >= (with_files ? 1 : kMostUnanswered)) {
    const bool slow = now_ns() - last_asked_ns_ > kPatienceNs;
    return {.state = slow ? State::refused : State::asked};
  }
  last_asked_ns_ = now_ns();
  const Share share{.number = next_number_, .device = device, .asked_ns = last_asked_ns_};
  if (!with_files) {
    const auto message = message_of(region, share.number, reader);
    const auto sent = send_message(socket_, message.bytes(), {});
    if (!sent || !*sent) return {};  // a broken socket shows as an event
  }
  ++next_number_;
  ++unanswered_;
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
        if (unanswered_ > 0) --unanswered_;  // the peer may have answered what was not asked
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
        if (!sent) return refuse(key, share->second, sent.error().text);
        if (*sent) {
          ++unanswered_;
        } else {
          shares_.erase(share);  // find() begins again
        }
      });
}

void GpuShares::on_answer(const RegionMessage& answer, std::string_view reason) {
  if (unanswered_ > 0) --unanswered_;
  for (auto& [key, share] : shares_) {
    if (share.number != answer.number || share.state != State::asked) continue;
    if (answer.kind == RegionMessage::Kind::refused) return refuse(key, share, reason);
    share.state = State::opened;
    return;
  }
}

void GpuShares::refuse(const Key& key, Share& share, std::string_view why) {
  share.state = State::refused;
  tell(share.device, key.second, why);
}

void GpuShares::tell(int from, int to, std::string_view why, bool slow) {
  if (!told_.emplace(from, to, slow).second) return;
  context_.tell("memory of GPU " + std::to_string(from) + " goes to GPU " + std::to_string(to) +
                " of " + peer_ + " by way of host memory: " + std::string(why));
}

std::vector<std::uint32_t> GpuShares::forget(const MemoryRegion& region) {
  std::vector<std::uint32_t> numbers;
  for (auto share = shares_.lower_bound({region.key(), 0});
       share != shares_.end() && share->first.first == region.key(); share = shares_.erase(share)) {
    numbers.push_back(share->second.number);
  }
  return numbers;
}

}  // namespace kvxfer::local
