#include "fabric/local/gpu_shares.hpp"

#include <algorithm>

#include "clock.hpp"
#include "cuda/gpu.hpp"
#include "fabric/local/gpu_probe.hpp"
#include "fabric/local/unix_socket.hpp"
#include "random.hpp"

namespace kvxfer::local {
namespace {

// The most regions that the peer is asked to open at a time; it accepts a few more.
constexpr std::size_t kMostUnanswered = 32;
constexpr std::uint64_t kPatienceNs = 500'000'000;

// Begins a message, which the caller completes.
GpuRegionMessage message_of(RegionMessage::Kind kind, const GpuShares::Share& share,
                            const cuda::Gpu& gpu) {
  return {.head = {.kind = kind, .number = share.number, .size = 0},
          .reader = static_cast<std::uint64_t>(share.reader),
          .owner = gpu.uuid()};
}

// True if the peer may have the memory open by a handle, for which CUDA does not keep it allocated.
bool is_lent(const GpuShares::Share& share) {
  return share.by_handle &&
         (share.state == GpuShares::State::asked || share.state == GpuShares::State::opened);
}

}  // namespace

GpuShares::GpuShares(GpuContext context, int socket, bool same_process, PathPeer peer,
                     std::uint32_t& next_number)
    : context_(std::move(context)),
      socket_(socket),
      same_process_(same_process),
      peer_(std::move(peer)),
      next_number_(next_number) {}

GpuShares::Share GpuShares::find(const MemoryRegion& region, int reader) {
  thread_.check("GpuShares");
  const Key key{region.key(), reader};
  const int device = region.gpu()->device();
  const auto known = shares_.find(key);
  if (known != shares_.end() && known->second.state != State::wanted) {
    return in_time(known->second);
  }
  const auto probe = probes_.find({device, reader});
  const bool probing = probe != probes_.end() && probe->second.state != State::opened;
  if (probing && probe->second.state != State::wanted) return in_time(probe->second);
  if (known == shares_.end() && shares_.size() >= kMostGpuRegions) {
    tell(device, reader, "the peer has too many regions open");
    return {.state = State::refused};
  }
  // Within one process, memory of a GPU is at its address. Other GPUs might read that after it was
  // freed, so they get files.
  const bool with_files = probing || (same_process_ ? device != reader : !region.ipc_handle());
  // Files are sent for one region at a time, because a process may have few.
  if (unanswered_ >= (with_files ? 1 : kMostUnanswered)) {
    const bool slow = now_ns() - last_asked_ns_ > kPatienceNs;
    return {.state = slow ? State::refused : State::asked};
  }
  last_asked_ns_ = now_ns();
  Share& share = probing ? probe->second : shares_[key];
  share = {.number = next_number_,
           .device = device,
           .reader = reader,
           .asked_ns = last_asked_ns_,
           .by_handle = !with_files && !same_process_};
  if (probing) {
    ask_with_probe(region.gpu(), share);
  } else if (!ask(region, share, with_files)) {
    share.state = State::wanted;
    return {};
  }
  ++next_number_;
  ++unanswered_;
  return share;
}

GpuShares::Share GpuShares::in_time(Share share) {
  if (share.state == State::asked && now_ns() - share.asked_ns > kPatienceNs) {
    share.state = State::refused;  // until it is open
    tell(share.device, share.reader, "opening it there takes long", true);
  }
  return share;
}

// Returns false if the socket is full, or broken, which shows as an event.
bool GpuShares::ask(const MemoryRegion& region, const Share& share, bool with_files) {
  auto message = message_of(RegionMessage::Kind::share_gpu, share, *region.gpu());
  message.head.size = region.size();
  message.offset = region.ipc_offset();
  message.address = region.address();
  message.handle = region.ipc_handle().value_or(cuda::IpcHandle{});
  if (!with_files) {
    const auto sent = send_message(socket_, message.bytes(), {});
    return sent && *sent;
  }
  ask_with_files(message, [gpu = region.gpu(), address = region.address(), size = region.size()] {
    return gpu->files_of(address, size);
  });
  return true;
}

void GpuShares::ask_with_probe(const std::shared_ptr<cuda::Gpu>& gpu, const Share& share) {
  auto message = message_of(RegionMessage::Kind::probe_gpu, share, *gpu);
  random_bytes(&message.seed, sizeof message.seed);
  ask_with_files(message, [gpu, seed = message.seed] { return offer_probe(*gpu, seed); });
}

void GpuShares::ask_with_files(GpuRegionMessage message, MakeFiles make) {
  context_.background.run<Result<cuda::FileParts>>(
      std::move(make),
      [this, message, self = std::weak_ptr(self_)](Result<cuda::FileParts> files) mutable {
        if (self.expired()) return;
        if (unanswered_ > 0) --unanswered_;  // the peer may have answered unasked
        Share* const share = asked(message.head.number);
        if (!share) return;
        if (!files) return refuse(*share, files.error().text);
        message.offset = files->offset;
        std::string bytes(message.bytes());
        std::vector<int> fds;
        for (const auto& part : files->parts) {
          bytes.append(reinterpret_cast<const char*>(&part.size), sizeof part.size);
          fds.push_back(part.file.get());
        }
        const auto sent = send_message(socket_, bytes, fds);
        if (!sent) return refuse(*share, sent.error().text);
        if (*sent) {
          ++unanswered_;
        } else {
          share->state = State::wanted;
        }
      });
}

GpuShares::Share* GpuShares::asked(std::uint32_t number) {
  const auto fits = [number](const auto& each) {
    return each.second.number == number && each.second.state == State::asked;
  };
  const auto probe = std::ranges::find_if(probes_, fits);
  if (probe != probes_.end()) return &probe->second;
  const auto share = std::ranges::find_if(shares_, fits);
  return share == shares_.end() ? nullptr : &share->second;
}

void GpuShares::on_answer(const RegionMessage& answer, std::string_view reason) {
  thread_.check("GpuShares");
  const auto lent = lent_.find(answer.number);
  if (lent != lent_.end() && answer.kind != RegionMessage::Kind::opened) {
    context_.lent.give_back(lent->second);
    lent_.erase(lent);
  }
  if (answer.kind == RegionMessage::Kind::closed) return;
  if (unanswered_ > 0) --unanswered_;
  Share* const share = asked(answer.number);
  if (!share) return;
  if (answer.kind == RegionMessage::Kind::refused) return refuse(*share, reason);
  if (answer.kind == RegionMessage::Kind::untried) return want_probe(*share);
  share->state = State::opened;
}

// Requests one probe for all regions of that GPU, which are asked for again after it.
void GpuShares::want_probe(Share& share) {
  const auto [probe, first] =
      probes_.try_emplace({share.device, share.reader}, Share{.state = State::wanted});
  if (!first && (&probe->second == &share || probe->second.state == State::opened)) {
    return refuse(share, "the peer does not say what its GPU reads");
  }
  share.state = State::wanted;
}

void GpuShares::refuse(Share& share, std::string_view why) {
  share.state = State::refused;
  tell(share.device, share.reader, why);
}

void GpuShares::tell(int from, int to, std::string_view why, bool slow) {
  if (!told_.emplace(from, to, slow).second) return;
  context_.tell("memory of GPU " + std::to_string(from) + " goes to GPU " + std::to_string(to) +
                " of " + peer_.label + " by way of host memory: " + std::string(why));
}

std::vector<std::uint32_t> GpuShares::forget(const MemoryRegion& region) {
  thread_.check("GpuShares");
  std::vector<std::uint32_t> numbers;
  for (auto share = shares_.lower_bound({region.key(), 0});
       share != shares_.end() && share->first.first == region.key(); share = shares_.erase(share)) {
    if (share->second.state != State::wanted) numbers.push_back(share->second.number);
    if (!peer_.stops || !is_lent(share->second)) continue;
    lent_.emplace(share->second.number, context_.lent.ask_back(region.key(), peer_.label));
  }
  return numbers;
}

std::vector<LentMemory::LoanId> GpuShares::ask_all_back() {
  std::vector<LentMemory::LoanId> loans;
  for (const auto& [number, loan] : std::exchange(lent_, {})) loans.push_back(loan);
  for (const auto& [key, share] : std::exchange(shares_, {})) {
    if (is_lent(share)) loans.push_back(context_.lent.ask_back(key.first, peer_.label));
  }
  return loans;
}

}  // namespace kvxfer::local
