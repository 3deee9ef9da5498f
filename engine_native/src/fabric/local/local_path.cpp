#include "fabric/local/local_path.hpp"

#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>

#include "fabric/local/region_message.hpp"
#include "fabric/local/unix_socket.hpp"
#include "refusal.hpp"

namespace kvxfer::local {
namespace {

// Per call of poll(), so that heartbeats and other peers get their turn.
constexpr std::uint64_t kPollBytes = 4u << 20;
// More than the socket holds, so all that came before a batch is seen; and then others get their
// turn.
constexpr int kPollMessages = 1024;

Error malformed(const char* what) {
  return {Errc::protocol_error, std::string("the peer's descriptor ring is malformed: ") + what};
}

}  // namespace

Result<std::unique_ptr<LocalPath>> LocalPath::open(LocalLink link, PathPeer peer, Poller& poller,
                                                   ReceiveContext receive_context,
                                                   PathEvents& events) {
  std::unique_ptr<LocalPath> path(
      new LocalPath(std::move(link), std::move(peer), poller, receive_context, events));
  if (auto good = poller.add(path->socket_.get(), EPOLLIN, *path); !good) {
    path->lost_ = true;
    return good.error();
  }
  return path;
}

LocalPath::LocalPath(LocalLink link, PathPeer peer, Poller& poller, ReceiveContext receive_context,
                     PathEvents& events)
    : socket_(std::move(link.socket)),
      out_(std::move(link.out)),
      in_(std::move(link.in)),
      wake_peer_(std::move(link.wake_peer)),
      source_(link.pid, std::move(link.pidfd)),
      peer_reads_us_(link.peer_reads_us),
      peer_(std::move(peer)),
      poller_(poller),
      receive_context_(receive_context),
      events_(events) {}

LocalPath::~LocalPath() {
  // Before any source memory of ours can be used again: see RingMemory::revoked.
  out_->revoked.store(1, std::memory_order_seq_cst);
  if (!lost_) poller_.remove(socket_.get(), *this);
  if (then_) then_();
}

// --- sending ---------------------------------------------------------------------------------

// The ring is the window: nothing of a write but its entry is stored on the way.
bool LocalPath::has_room(bool) const {
  return !lost_ && kRingSlots - (produced_ - reaped_) > kMaxGroupWrites;
}

std::size_t LocalPath::post(const OperationPtr& operation, const WriteRange& range) {
  BatchHead head{.key = operation->destination_key,
                 .imm = operation->imm.value_or(0),
                 .has_imm = operation->imm && range.counted};
  const MemoryRegion* source = operation->source.get();
  std::uint64_t base = 0;  // of an address over here, where the source is not shared
  if (source && source->shareable()) {
    const auto number = share(*source);
    if (!number) return 0;
    head.from_region = 1;
    head.region = *number;
  } else if (source) {
    base = reinterpret_cast<std::uint64_t>(source->data());
  }

  const auto& writes = operation->writes;
  const std::size_t room = kRingSlots - (produced_ - reaped_) - 1;
  const std::size_t first = range.first;
  const std::size_t end =
      first + operation->batch(range, std::min<std::size_t>(room, kMaxBatchWrites), kMaxBatchBytes);
  std::uint64_t bytes = 0;
  for (std::size_t i = first; i < end; ++i) {
    const WireWrite& write = writes[i];
    out_.slot(produced_ + 1 + (i - first)).write = {base + write.source, write.destination,
                                                    write.length, write.grouped};
    bytes += write.length;
  }
  head.count = static_cast<std::uint32_t>(end - first);
  out_.slot(produced_).head = head;
  const std::uint64_t next = produced_ + 1 + head.count;
  unacked_.push_back({operation,
                      {first, end - first, range.counted},
                      bytes,
                      produced_,
                      next,
                      end == first + range.count});
  produced_ = next;
  out_->produced.store(produced_);
  if (out_->consumer_sleeps.load() != 0 && out_->consumer_sleeps.exchange(0) != 0) wake_peer();
  return end - first;
}

std::optional<std::uint32_t> LocalPath::share(const MemoryRegion& region) {
  if (const auto known = shared_.find(region.key()); known != shared_.end()) return known->second;
  const RegionMessage message{
      .kind = RegionMessage::Kind::share, .number = next_number_, .size = region.size()};
  const auto sent = send_message(socket_.get(), message.bytes(), {region.memfd()});
  if (!sent || !*sent) return std::nullopt;  // a broken socket shows as an event
  shared_.emplace(region.key(), next_number_);
  return next_number_++;
}

void LocalPath::forget_source(const MemoryRegion& region) {
  const auto known = shared_.find(region.key());
  if (known == shared_.end()) return;
  const RegionMessage message{
      .kind = RegionMessage::Kind::forget, .number = known->second, .size = 0};
  // If the socket is full the peer keeps its mapping until the path ends: no more than memory.
  (void)send_message(socket_.get(), message.bytes(), {});
  shared_.erase(known);
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
    const Batch batch = std::move(unacked_.front());
    unacked_.pop_front();
    reaped_ = batch.end;
    const auto status = static_cast<Errc>(out_.slot(batch.head).head.status);
    if (status == Errc::ok) {
      receive_context_.stats.bytes_sent += batch.bytes;
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
  const std::uint64_t start = consumed_;
  const std::uint64_t produced = in_->produced.load(std::memory_order_acquire);
  if (produced - consumed_ > kRingSlots) {
    lose(malformed("more entries than slots"));
    return true;
  }
  std::uint64_t budget = kPollBytes;
  while (consumed_ != produced && budget > 0 && !lost_) {
    const BatchHead head = in_.slot(consumed_).head;
    if (head.count == 0 || head.count > kMaxBatchWrites || head.count >= produced - consumed_) {
      lose(malformed("a batch leaves the ring"));
      break;
    }
    Errc status = Errc::ok;
    const auto bytes = place(head, status);
    if (!bytes) {
      lose(bytes.error());
      break;
    }
    budget -= std::min(budget, *bytes);
    in_.slot(consumed_).head.status = static_cast<std::uint16_t>(status);
    consumed_ += 1 + head.count;
    in_->consumed.store(consumed_);
  }
  if (consumed_ == start) return lost_;
  auto& until = in_->producer_sleeps_until;
  std::uint64_t seen = until.load();
  if (seen <= consumed_ && until.compare_exchange_strong(seen, RingMemory::kAwake)) wake_peer();
  return true;
}

Result<std::uint64_t> LocalPath::place(const BatchHead& head, Errc& status) {
  Placement placement(receive_context_, peer_.id, head.key,
                      head.has_imm ? std::optional<Imm>(head.imm) : std::nullopt);
  // The message that shares a region was sent before the batch that uses it.
  if (head.from_region && !source_.has_region(head.region)) receive_regions();
  copies_.clear();
  std::uint64_t bytes = 0;
  std::uint64_t immediates = 0;
  for (std::uint32_t i = 1; i <= head.count; ++i) {
    const WriteEntry entry = in_.slot(consumed_ + i).write;
    bytes += entry.length;
    immediates += entry.grouped == 0 ? 1 : 0;
    std::byte* const destination = placement.target(entry.destination, entry.length);
    if (!destination || entry.length == 0) continue;
    const std::byte* source = reinterpret_cast<const std::byte*>(entry.source);
    if (head.from_region) source = source_.in_region(head.region, entry.source, entry.length);
    if (head.from_region && !source) {
      placement.refuse(Errc::out_of_bounds);
      break;
    }
    copies_.push_back({source, destination, entry.length});
  }
  if (bytes > kMaxBatchBytes) return malformed("an oversized batch");
  if (placement.status() == Errc::ok && head.from_region) {
    copy_pages(copies_);
  } else if (placement.status() == Errc::ok && !copies_.empty()) {
    const Errc read = source_.read(copies_);
    if (read == Errc::peer_lost) return Error{read, "the peer process is gone"};
    placement.refuse(read);
  }
  // A read-modify-write, so that no read of the copy can move behind it.
  if (in_->revoked.fetch_add(0, std::memory_order_acq_rel) != 0) {
    return Error{Errc::peer_lost, "the peer closed the connection"};
  }
  placement.finish(head.count, immediates, bytes);
  status = placement.status();
  return bytes;
}

void LocalPath::receive_regions() {
  for (int i = 0; i < kPollMessages && !lost_; ++i) {
    auto message = receive_message(socket_.get());
    if (!message) return lose(message.error());
    if (message->bytes.empty()) return;
    const auto region = RegionMessage::parse(message->bytes);
    if (region && region->kind == RegionMessage::Kind::forget) {
      source_.remove_region(region->number);
    } else if (region && message->descriptors.size() == 1) {
      auto good =
          source_.add_region(region->number, std::move(message->descriptors[0]), region->size);
      if (!good) return lose(good.error());
    } else {
      return lose({Errc::protocol_error, "the peer sent a malformed region message"});
    }
  }
}

// --- both ------------------------------------------------------------------------------------

void LocalPath::poll() {
  if (lost_) return;
  const bool consumed = consume();
  if (reap() || consumed) ++receive_context_.activity;
}

bool LocalPath::prepare_sleep() {
  if (lost_) return true;
  in_->consumer_sleeps.store(1);
  const std::uint64_t wanted = wanted_progress();
  out_->producer_sleeps_until.store(wanted);
  return in_->produced.load() == consumed_ && (unacked_.empty() || out_->consumed.load() < wanted);
}

void LocalPath::finish_sleep() {
  in_->consumer_sleeps.store(0, std::memory_order_relaxed);
  out_->producer_sleeps_until.store(RingMemory::kAwake, std::memory_order_relaxed);
}

// Where the ring has to get to before waking up is worth it: the end of an operation, or half of
// what is posted, so that the receiver does not run dry.
std::uint64_t LocalPath::wanted_progress() const {
  if (unacked_.empty()) return RingMemory::kAwake;
  for (const Batch& batch : unacked_) {
    const bool half = batch.end - reaped_ >= (produced_ - reaped_) / 2;
    if (half || batch.last) return batch.end;
  }
  return produced_;
}

void LocalPath::on_events(std::uint32_t) {
  if (!lost_) receive_regions();
}

void LocalPath::wake_peer() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_peer_.get(), &one, sizeof one);
}

void LocalPath::lose(Error error) {
  if (lost_) return;
  lost_ = true;
  poller_.remove(socket_.get(), *this);
  events_.on_lost(*this, std::move(error));
}

}  // namespace kvxfer::local
