#include "fabric/local/local_path.hpp"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "fabric/local/region_message.hpp"
#include "memory_order.hpp"
#include "refusal.hpp"

namespace kvxfer::local {
namespace {

// The most bytes of a call of poll(), so that heartbeats and other peers get their turn.
constexpr std::uint64_t kPollBytes = 4u << 20;
static_assert(kMaxBatchBytes <= cuda::kSlotBytes);
// The cost of a copy by a GPU, in bytes of that budget.
constexpr std::uint64_t kGpuCopyBytes = 256;
// The most staging slots that a path holds until the peer has read them, so that other paths get
// some.
constexpr std::size_t kMostSlots = 3;
// Launches that keep a GPU busy. Batches that arrive meanwhile become one launch, because a large
// launch costs as much as a small one.
constexpr std::size_t kFewLaunches = 2;
// More than the socket holds, so that all messages before a batch are read; then others get their
// turn.
constexpr int kPollMessages = 1024;

Error malformed(const char* what) {
  return {Errc::protocol_error, std::string("the peer's descriptor ring is malformed: ") + what};
}

Error malformed_message() {
  return {Errc::protocol_error, "the peer sent a malformed region message"};
}

Error no_descriptors() {
  return {Errc::out_of_memory,
          "there are no descriptors left for what a peer shares; raise the open files limit"};
}

}  // namespace

Result<std::unique_ptr<LocalPath>> LocalPath::open(LocalLink link, PathPeer peer, Poller& poller,
                                                   ReceiveContext receive_context,
                                                   PathEvents& events, GpuContext gpus) {
  std::unique_ptr<LocalPath> path(new LocalPath(std::move(link), std::move(peer), poller,
                                                receive_context, events, std::move(gpus)));
  if (auto good = poller.add(path->socket_->get(), EPOLLIN, *path); !good) {
    path->lost_ = true;
    return good.error();
  }
  return path;
}

LocalPath::LocalPath(LocalLink link, PathPeer peer, Poller& poller, ReceiveContext receive_context,
                     PathEvents& events, GpuContext gpus)
    : socket_(std::make_shared<UniqueFd>(std::move(link.socket))),
      open_(socket_.get(), [socket = socket_](void*) { ::shutdown(socket->get(), SHUT_WR); }),
      out_(std::move(link.out)),
      in_(std::move(link.in)),
      wake_peer_(std::move(link.wake_peer)),
      source_(link.pid, std::move(link.pidfd)),
      peer_reads_us_(link.peer_reads_us),
      peer_(std::move(peer)),
      lent_(gpus.lent),
      poller_(poller),
      receive_context_(receive_context),
      events_(events),
      gpu_shares_(gpus, socket_->get(), source_.pid() == ::getpid(), peer_, next_number_),
      gpu_sources_(std::move(gpus), open_, [this](std::uint32_t number) {
        if (!lost_ && peer_.stops) answer_gpu_region(RegionMessage::Kind::closed, number);
      }) {}

LocalPath::~LocalPath() {
  // Revokes before any source memory of ours can be used again: see RingMemory::revoked. On ARM
  // later plain stores may pass a store (STLR): without an engine thread, whose hand-over would
  // order them, the peer could copy what the caller stores into the source next and still see 0
  // here. The fence forbids it. The peer reads the word by a read-modify-write after its copy: if
  // that reads 0, this store and all after the fence come after the bytes that it copied.
  out_->revoked.store(1, std::memory_order_seq_cst);
  order_stores();
  if (!lost_) poller_.remove(socket_->get(), *this);
  lent_.give_back_at_end(socket_, gpu_shares_.ask_all_back());
  if (then_) then_();
}

// --- sending ---------------------------------------------------------------------------------

bool LocalPath::reaches(const Operation& operation) const {
  const auto& source = operation.source;
  if (operation.nic) return false;
  if (!source || source->shareable() || peer_reads_us_) return true;
  return source->gpu() && source->gpu()->to_send().shareable();
}

// Returns how many writes the ring has room for, besides the head of their batch.
std::size_t LocalPath::room() const {
  const std::uint64_t used = produced_ - reaped_;
  return used < kRingSlots ? kRingSlots - used - 1 : 0;
}

// The ring is the send window: only the entry of a write is stored on the way.
bool LocalPath::has_room(const Operation&, bool) const {
  return !lost_ && room() >= kMaxGroupWrites;
}

std::size_t LocalPath::post(const OperationPtr& operation, const WriteRange& range) {
  thread_.check("LocalPath");
  const MemoryRegion* const source = operation->source.get();
  std::optional<Origin> origin = Origin{};
  if (source && source->gpu()) {
    GpuShares::Share share{.state = GpuShares::State::refused};
    if (operation->destination_gpu) share = gpu_shares_.find(*source, *operation->destination_gpu);
    if (share.state == GpuShares::State::asked) return 0;
    if (share.state == GpuShares::State::refused) return stage(operation, range);
    // The peer would not notice a lost GPU, and would read whatever its memory holds now.
    if (range.first == 0 && !asked_if_alive(*operation)) return 0;
    origin->region = share.number;
  } else if (source) {
    origin = origin_of(*source);
  }
  if (!origin) return 0;
  const std::size_t most = std::min<std::size_t>(room(), kMaxBatchWrites);
  const std::size_t count = operation->batch(range, most, kMaxBatchBytes);
  produce({.operation = operation,
           .writes = {range.first, count, range.counted},
           .last = count == range.count},
          *origin, false);
  return count;
}

// True if the GPU has answered that it is alive. If it is lost, the operation fails with the next
// try.
bool LocalPath::asked_if_alive(Operation& operation) {
  const auto& gpu = operation.source->gpu();
  if (operation.question == 0) operation.question = gpu->ask();
  if (!gpu->answered(operation.question)) return false;
  operation.question = 0;
  if (!gpu->failure()) return true;
  ++receive_context_.activity;
  return false;
}

// Returns nullopt while the peer cannot be told of the region.
std::optional<LocalPath::Origin> LocalPath::origin_of(const MemoryRegion& region) {
  if (!region.shareable()) return Origin{.base = region.address()};
  const auto number = share(region);
  return number ? std::optional(Origin{.region = number, .base = region.memfd_offset()})
                : std::nullopt;
}

// Puts a batch into the ring. `packed`: its writes follow each other from the origin's base on.
void LocalPath::produce(Batch batch, const Origin& origin, bool packed) {
  const Operation& operation = *batch.operation;
  const BatchHead head{.key = operation.destination_key,
                       .count = static_cast<std::uint32_t>(batch.writes.count),
                       .imm = operation.imm.value_or(0),
                       .has_imm = operation.names_imm(batch.writes, peer_.groups),
                       .from_region = origin.region.has_value(),
                       .region = origin.region.value_or(0)};
  std::uint64_t next = produced_;
  out_.slot(next++).head = head;
  for (const WireWrite& write : operation.writes.subspan(batch.writes.first, head.count)) {
    const std::uint64_t offset = packed ? batch.bytes : write.source;
    out_.slot(next++).write = {origin.base + offset, write.destination, write.length,
                               Operation::grouped(batch.writes, write)};
    batch.bytes += write.length;
  }
  batch.head = produced_;
  batch.end = next;
  unacked_.push_back(std::move(batch));
  produced_ = next;
  out_->produced.store(produced_);
  if (out_->consumer_sleeps.load() != 0 && out_->consumer_sleeps.exchange(0) != 0) wake_peer();
}

// --- out of a GPU ----------------------------------------------------------------------------

// Copies the writes to host memory, which the peer reads.
std::size_t LocalPath::stage(const OperationPtr& operation, const WriteRange& range) {
  if (slots_ >= kMostSlots) return 0;
  const MemoryRegion& source = *operation->source;
  const auto copies = source.gpu()->room();
  if (copies.empty()) return 0;
  auto slot = source.gpu()->slot_to_send();
  if (!slot) return 0;
  const std::size_t count = operation->batch(range, kMaxBatchWrites, kMaxBatchBytes);
  std::size_t copied = 0;
  std::uint64_t at = slot->address();
  for (const WireWrite& write : operation->writes.subspan(range.first, count)) {
    if (write.length == 0) continue;
    copies[copied++] = {source.address() + write.source, at, write.length};
    at += write.length;
  }
  ++slots_;
  staged_.push_back({.batch = {.operation = operation,
                               .writes = {range.first, count, range.counted},
                               .last = count == range.count,
                               .slot = std::move(slot)},
                     .gpu = source.gpu(),
                     .copied = copied > 0 ? source.gpu()->launch(copied) : 0});
  return count;
}

bool LocalPath::post_staged() {
  bool any = false;
  for (; !staged_.empty(); any = true) {
    Staged& next = staged_.front();
    if (!next.gpu->ended(next.copied) || room() < next.batch.writes.count) break;
    const cuda::Gpu& gpu = *next.gpu;
    auto origin = origin_of(gpu.to_send());
    if (!gpu.failure() && !origin) break;
    Staged staged = std::move(next);
    staged_.pop_front();
    if (gpu.failure()) {
      --slots_;
      events_.on_finished(staged.batch.operation, staged.batch.writes, *gpu.failure());
      continue;
    }
    origin->base += staged.batch.slot->address() - gpu.to_send().address();
    produce(std::move(staged.batch), *origin, true);
  }
  return any;
}

// --- sharing regions -------------------------------------------------------------------------

std::optional<std::uint32_t> LocalPath::share(const MemoryRegion& region) {
  if (const auto known = shared_.find(region.key()); known != shared_.end()) return known->second;
  const RegionMessage message{.kind = RegionMessage::Kind::share,
                              .number = next_number_,
                              .size = region.memfd_offset() + region.size()};
  const auto sent = send_message(socket_->get(), message.bytes(), {region.memfd()});
  if (!sent || !*sent) return std::nullopt;  // a broken socket shows as an event
  shared_.emplace(region.key(), next_number_);
  return next_number_++;
}

void LocalPath::forget_source(const MemoryRegion& region) {
  for (const std::uint32_t number : gpu_shares_.forget(region)) to_forget_.push_back(number);
  if (const auto known = shared_.extract(region.key())) to_forget_.push_back(known.mapped());
  send_forgets();
}

// Sends forgets while the socket has room; until the others are sent, the peer keeps its mappings.
void LocalPath::send_forgets() {
  while (!to_forget_.empty()) {
    const RegionMessage message{
        .kind = RegionMessage::Kind::forget, .number = to_forget_.front(), .size = 0};
    const auto sent = send_message(socket_->get(), message.bytes(), {});
    if (!sent || !*sent) return;
    to_forget_.pop_front();
  }
}

bool LocalPath::reap() {
  if (unacked_.empty()) return false;
  const std::uint64_t consumed = out_->consumed.load(std::memory_order_acquire);
  if (consumed > produced_) {
    lose(malformed("more is consumed than was produced"));
    return false;
  }
  bool moved = false;
  while (!unacked_.empty() && unacked_.front().end <= consumed) {
    Batch batch = std::move(unacked_.front());
    unacked_.pop_front();
    const bool staged = batch.slot.has_value();
    if (staged) --slots_;
    batch.slot.reset();  // first, because the operation's end may need its room
    reaped_ = batch.end;
    const auto status = static_cast<Errc>(out_.slot(batch.head).head.status);
    if (status == Errc::ok) {
      receive_context_.stats.bytes_sent += batch.bytes;
      if (staged) receive_context_.stats.bytes_staged += batch.bytes;
      receive_context_.stats.writes_sent += batch.writes.count;
    }
    events_.on_finished(
        batch.operation, batch.writes,
        status == Errc::ok ? Error{} : refusal(status, *batch.operation, peer_.label));
    moved = true;
  }
  return moved;
}

// --- receiving -------------------------------------------------------------------------------

bool LocalPath::consume() {
  const std::uint64_t start = taken_;
  const std::uint64_t produced = in_->produced.load(std::memory_order_acquire);
  const bool back = produced - consumed_ < taken_ - consumed_;
  if (back || produced - consumed_ > kRingSlots) {
    lose(malformed("more entries than slots"));
    return true;
  }
  waits_ = false;
  std::uint64_t budget = kPollBytes;
  while (taken_ != produced && budget > 0 && !lost_) {
    const BatchHead head = in_.slot(taken_).head;
    if (head.count == 0 || head.count > kMaxBatchWrites || head.count >= produced - taken_) {
      lose(malformed("a batch leaves the ring"));
      break;
    }
    const auto placed = place(head, budget);
    if (!placed) {
      lose(placed.error());
      break;
    }
    waits_ = !*placed;
    if (waits_) break;
    taken_ += 1 + head.count;
    if (placing_.size() == 1) end_placed();
  }
  launch();
  const bool ended = end_placed();
  if (taken_ == start && !ended) return lost_;
  auto& until = in_->producer_sleeps_until;
  std::uint64_t seen = until.load();
  if (seen <= consumed_ && until.compare_exchange_strong(seen, RingMemory::kAwake)) wake_peer();
  return true;
}

Result<bool> LocalPath::place(const BatchHead& head, std::uint64_t& budget) {
  Placing batch{.placement = {receive_context_, peer_.id, head.key,
                              head.has_imm ? std::optional<Imm>(head.imm) : std::nullopt},
                .head = taken_,
                .end = taken_ + 1 + head.count,
                .writes = head.count};
  // The message that shares a region was sent before the batch that uses it.
  const bool known = source_.has_region(head.region) || gpu_sources_.has(head.region);
  if (head.from_region && !known) receive_regions();
  entries_.clear();
  for (std::uint32_t i = 1; i <= head.count; ++i) {
    const WriteEntry entry = in_.slot(taken_ + i).write;
    batch.bytes += entry.length;
    batch.immediates += entry.grouped == 0 ? 1 : 0;
    const std::uint64_t target = batch.placement.target(entry.destination, entry.length);
    if (target != 0 && entry.length > 0) entries_.push_back({entry.source, target, entry.length});
  }
  if (batch.bytes > kMaxBatchBytes) return malformed("an oversized batch");
  std::uint64_t cost = batch.bytes;
  if (batch.placement.status() == Errc::ok && !entries_.empty()) {
    const bool by_gpu = batch.placement.gpu() != nullptr;
    const auto copied = by_gpu ? copy_by_gpu(head, batch, cost) : copy_from_host(head, batch);
    if (!copied || !*copied) return copied;
  }
  budget -= std::min(budget, cost);
  placing_.push_back(std::move(batch));
  return true;
}

// Copies the entries to their destinations, or one after the other to `slot`.
Result<bool> LocalPath::copy_from_host(const BatchHead& head, Placing& batch, std::byte* slot) {
  copies_.clear();
  for (const cuda::DeviceCopy& entry : entries_) {
    const auto* source = reinterpret_cast<const std::byte*>(entry.source);
    if (head.from_region) source = source_.in_region(head.region, entry.source, entry.length);
    if (head.from_region && !source) {
      batch.placement.refuse(Errc::out_of_bounds);
      return true;
    }
    auto* const target = slot ? slot : reinterpret_cast<std::byte*>(entry.destination);
    copies_.push_back({source, target, entry.length});
    if (slot) slot += entry.length;
  }
  if (head.from_region) {
    copy_pages(copies_);
    return true;
  }
  const Errc read = source_.read(copies_);
  if (read == Errc::peer_lost) return Error{read, "the peer process is gone"};
  batch.placement.refuse(read);
  return true;
}

// Adds the batch to the launch that is being collected. `cost`: the part of a poll's budget.
Result<bool> LocalPath::copy_by_gpu(const BatchHead& head, Placing& batch, std::uint64_t& cost) {
  const std::shared_ptr<cuda::Gpu>& gpu = batch.placement.gpu();
  const bool full = collected_ + entries_.size() > cuda::Gpu::kMaxCopies;
  if (collecting_ && (collecting_ != gpu || full)) launch();
  const auto room = gpu->room();
  if (gpu->failure()) {
    batch.placement.refuse(Errc::gpu_lost);
    return true;
  }
  if (room.empty() || (!collecting_ && launches_.size() >= kFewLaunches)) return false;
  const bool from_gpu = head.from_region && !source_.has_region(head.region);
  if (from_gpu) {
    cost = entries_.size() * kGpuCopyBytes;
    for (cuda::DeviceCopy& entry : entries_) {
      entry.source = gpu_sources_.in_region(head.region, entry.source, entry.length, *gpu);
      if (entry.source == 0) batch.placement.refuse(Errc::out_of_bounds);
    }
  } else {
    auto slot = gpu->slot_to_receive();
    if (!slot) return false;
    const auto copied = copy_from_host(head, batch, slot->bytes());
    if (!copied) return copied;
    std::uint64_t at = slot->address();
    for (cuda::DeviceCopy& entry : entries_) entry.source = std::exchange(at, at + entry.length);
    collected_slots_.push_back(std::move(*slot));
  }
  if (batch.placement.status() != Errc::ok) return true;
  std::copy(entries_.begin(), entries_.end(),
            room.begin() + static_cast<std::ptrdiff_t>(collected_));
  collected_ += entries_.size();
  collecting_ = gpu;
  batch.copied = gpu->next();
  return true;
}

void LocalPath::launch() {
  if (collecting_ && in_->revoked.load() != 0) {
    lose({Errc::peer_lost, "the peer closed the connection"});  // the peer's memory may be gone
  } else if (collecting_) {
    const cuda::Ticket ticket = collecting_->launch(collected_);
    launches_.emplace_back(collecting_, ticket);
  }
  collecting_.reset();
  collected_ = 0;
  collected_slots_.clear();
}

bool LocalPath::end_placed() {
  bool any = false;
  while (!launches_.empty() && launches_.front().first->ended(launches_.front().second)) {
    launches_.pop_front();
  }
  for (; !placing_.empty() && !lost_; any = true) {
    Placing& batch = placing_.front();
    if (batch.copied != 0) {
      const cuda::Gpu& gpu = *batch.placement.gpu();
      if (!gpu.ended(batch.copied)) break;
      if (gpu.failure()) batch.placement.refuse(Errc::gpu_lost);
    }
    // A read-modify-write, so that no read of the copy can move after it.
    if (in_->revoked.fetch_add(0, std::memory_order_acq_rel) != 0) {
      lose({Errc::peer_lost, "the peer closed the connection"});
      break;
    }
    batch.placement.finish(batch.writes, batch.immediates, batch.bytes);
    in_.slot(batch.head).head.status = static_cast<std::uint16_t>(batch.placement.status());
    consumed_ = batch.end;
    in_->consumed.store(consumed_);
    placing_.pop_front();
  }
  return any;
}

void LocalPath::revoke_counter(Imm imm) {
  thread_.check("LocalPath");
  for (Placing& batch : placing_) batch.placement.revoke_counter(imm);
}

void LocalPath::revoke_region(std::uint64_t key) {
  for (Placing& batch : placing_) batch.placement.revoke_region(key);
}

void LocalPath::receive_regions() {
  for (int i = 0; i < kPollMessages && !lost_; ++i) {
    bool lacking = false;
    auto message = receive_message(socket_->get(), &lacking);
    if (!message) return lose(message.error());
    if (message->bytes.empty()) return;
    if (auto good = on_region(*message, lacking); !good) return lose(good.error());
  }
}

Result<void> LocalPath::on_region(UnixMessage& message, bool lacking) {
  if (const auto on_gpu = GpuRegionMessage::parse(message.bytes)) {
    return on_gpu_region(*on_gpu, message, lacking);
  }
  if (lacking) return no_descriptors();
  const auto region = RegionMessage::parse(message.bytes);
  if (region && region->kind == RegionMessage::Kind::forget) {
    source_.remove_region(region->number);
    launch();  // the collected copies may read it
    gpu_sources_.remove(region->number);
    return {};
  }
  if (region && region->kind == RegionMessage::Kind::share && message.descriptors.size() == 1) {
    return source_.add_region(region->number, std::move(message.descriptors[0]), region->size);
  }
  if (region && region->kind != RegionMessage::Kind::share) {
    gpu_shares_.on_answer(*region, std::string_view(message.bytes).substr(sizeof *region));
    ++receive_context_.activity;
    return {};
  }
  return malformed_message();
}

Result<void> LocalPath::on_gpu_region(const GpuRegionMessage& region, UnixMessage& message,
                                      bool lacking) {
  using Kind = RegionMessage::Kind;
  const auto answer_with = [this](std::uint32_t number, const Result<void>& opened) {
    if (opened) return answer_gpu_region(Kind::opened, number);
    answer_gpu_region(Kind::refused, number, opened.error().text);
  };
  if (lacking) {
    answer_with(region.head.number, no_descriptors());
    return {};
  }
  const auto sizes = GpuRegionMessage::sizes(message.bytes, message.descriptors.size());
  if (!sizes) return malformed_message();
  cuda::FileParts files{.offset = region.offset};
  for (std::size_t i = 0; i < sizes->size(); ++i) {
    files.parts.push_back({.file = std::move(message.descriptors[i]), .size = (*sizes)[i]});
  }
  if (region.head.kind == Kind::probe_gpu) {
    return gpu_sources_.probe(region, std::move(files), answer_with);
  }
  if (!gpu_sources_.tried(region)) {
    answer_gpu_region(Kind::untried, region.head.number);
    return {};
  }
  return gpu_sources_.add(region, std::move(files), source_.pid() == ::getpid(), answer_with);
}

void LocalPath::answer_gpu_region(RegionMessage::Kind kind, std::uint32_t number,
                                  std::string_view why) {
  const std::string reason(why.substr(0, RegionMessage::kMostReason));
  const RegionMessage answer{.kind = kind, .number = number, .size = reason.size()};
  const auto sent = send_message(socket_->get(), std::string(answer.bytes()) + reason, {});
  if (!sent || !*sent) lose({Errc::backpressure, "the peer does not read what it is sent"});
}

// --- both ------------------------------------------------------------------------------------

void LocalPath::poll() {
  thread_.check("LocalPath");
  if (lost_) return;
  if (!to_forget_.empty()) send_forgets();
  const bool posted = post_staged();
  const bool consumed = consume();
  if (reap() || consumed || posted) ++receive_context_.activity;
}

bool LocalPath::prepare_sleep() {
  if (lost_) return true;
  in_->consumer_sleeps.store(1);
  const std::uint64_t wanted = wanted_progress();
  out_->producer_sleeps_until.store(wanted);
  return (in_->produced.load() == taken_ || waits_) &&
         (unacked_.empty() || out_->consumed.load() < wanted);
}

void LocalPath::finish_sleep() {
  in_->consumer_sleeps.store(0, std::memory_order_relaxed);
  out_->producer_sleeps_until.store(RingMemory::kAwake, std::memory_order_relaxed);
}

// Returns the position at which waking up is worth it: the end of an operation, or half of the
// posted entries, so that the receiver does not run dry.
std::uint64_t LocalPath::wanted_progress() const {
  if (unacked_.empty()) return RingMemory::kAwake;
  for (const Batch& batch : unacked_) {
    const bool half = batch.end - reaped_ >= (produced_ - reaped_) / 2;
    if (half || batch.last) return batch.end;
  }
  return produced_;
}

void LocalPath::on_events(std::uint32_t) {
  thread_.check("LocalPath");
  if (!lost_) receive_regions();
}

void LocalPath::wake_peer() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_peer_.get(), &one, sizeof one);
}

void LocalPath::lose(Error error) {
  if (lost_) return;
  lost_ = true;
  reap();  // batches that the peer counted before it closed are delivered
  poller_.remove(socket_->get(), *this);
  events_.on_lost(*this, std::move(error));
}

}  // namespace kvxfer::local
