#include "group/peer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bootstrap/bytes.hpp"
#include "clock.hpp"
#include "cuda/gpu.hpp"
#include "refusal.hpp"

namespace kvxfer {
namespace {

// Frames on the control stream: this head, then `size` bytes.
struct FrameHead {
  std::uint32_t size;
  ControlFrame type;
  std::uint8_t reserved[3];
};
static_assert(sizeof(FrameHead) == 8);

// A heartbeat is not worth queueing behind this much.
constexpr std::size_t kHeartbeatBehind = 1u << 20;
// Messages have their own bound, a quarter of it; the rest are answers to the peer.
constexpr std::size_t kMaxUnsentBytes = 64u << 20;

std::string make_label(const Session& session) {
  const std::string id = "engine " + session.peer.hex().substr(0, 8);
  const std::string& name = session.introduction.name;
  return name.empty() ? id : "'" + name + "' (" + id + ")";
}

}  // namespace

Peer::Peer(PeerId id, std::unique_ptr<Stream> stream, Session session, PeerEvents& events,
           OperationBook& operations)
    : handle_(std::make_shared<PeerHandle>()),
      stream_(std::move(stream)),
      session_(std::move(session)),
      events_(events),
      operations_(operations),
      patience_(now_ns()),
      last_path_ns_(now_ns()) {
  handle_->id = id;
  handle_->engine = session_.peer;
  handle_->label = make_label(session_);
  stream_->set_owner(*this);
}

std::string Peer::fabric() const {
  const auto best = std::min_element(choices_.begin(), choices_.end(),
                                     [](auto* a, auto* b) { return a->rank() < b->rank(); });
  return best == choices_.end() ? std::string() : std::string((*best)->fabric());
}

// --- set-up ----------------------------------------------------------------------------------

void Peer::use_nics(const std::vector<std::unique_ptr<NicDomain>>& ours, bool initiator,
                    const EngineOptions& options) {
  bool common = false;
  bool ordered = true;
  for (const auto& nic : ours) {
    if (!shares_network(nic->info(), session_.introduction.nics)) continue;
    common = true;
    ordered = ordered && nic->keeps_order();
  }
  handle_->groups = ordered && session_.version >= kGroupsVersion;
  if (!common) return;
  NicLinkOwner& owner = *this;
  nics_ = std::make_unique<NicLink>(
      NicLink::Ends{
          .peer = id(),
          .label = label(),
          .theirs = session_.introduction.nics,
          .initiator = initiator,
          .timeout_ns = static_cast<std::uint64_t>(options.peer_timeout.count()),
          .path_timeout_ns = static_cast<std::uint64_t>(options.tuning.path_timeout.count()),
          .paths_per_nic_pair = options.tuning.paths_per_nic_pair,
          .stops = session_.version >= kPathStopVersion},
      ours, owner, operations_);
}

void Peer::add_path(std::unique_ptr<Path> path, std::uint32_t lane) {
  paths_.push_back(std::move(path));
  lanes_.push_back(lane);
  list_choices();
  confirm_paths();
}

void Peer::list_choices() {
  if (!choices_.empty()) last_path_ns_ = now_ns();
  choices_.clear();
  for (const auto& path : paths_) choices_.push_back(path.get());
  handle_->shards = 1;
  if (!nics_) return;
  const auto& open = nics_->usable_paths();
  choices_.insert(choices_.end(), open.begin(), open.end());
  handle_->shards = static_cast<unsigned>(std::max<std::size_t>(open.size(), 1));
}

void Peer::on_paths_changed() {
  list_choices();
  initiator() ? announce_paths() : confirm_paths();
}

// The announcement and the last path come over different sockets, in either order.
void Peer::confirm_paths() {
  if (state_ != State::opening || announced_ != paths_.size()) return;
  if (nics_ && !nics_->settled()) return;
  send_frame(ControlFrame::ready, {});
  come_up();
}

bool Peer::has_lane(std::uint32_t lane) const {
  return std::find(lanes_.begin(), lanes_.end(), lane) != lanes_.end();
}

void Peer::announce_paths() {
  if (state_ != State::opening || lanes_to_open > 0 || (nics_ && !nics_->settled())) return;
  if (choices_.empty()) {
    if (!nics_) lose({Errc::connect_failed, "no path to it could be opened"});
    return;
  }
  state_ = State::announced;
  send_frame(ControlFrame::paths,
             ByteWriter().put(static_cast<std::uint32_t>(paths_.size())).take());
}

std::string Peer::trouble() const {
  if (!nics_ || !choices_.empty()) return "the peer did not finish the connection in time";
  return "no NIC has a path to it: " +
         (nics_->trouble().empty() ? "their links are down" : nics_->trouble());
}

void Peer::handle_frame(ControlFrame type, std::string payload) {
  if (nics_ && is_nic_frame(static_cast<std::uint8_t>(type))) {
    const auto frame = static_cast<NicFrame>(type);
    if (auto good = nics_->on_frame(frame, payload, now_ns()); !good) return lose(good.error());
    return;
  }
  switch (type) {
    case ControlFrame::heartbeat:
      return;
    case ControlFrame::message:
      if (state_ == State::up) return events_.on_message(*this, std::move(payload));
      break;
    case ControlFrame::paths: {
      ByteReader reader(payload);
      const auto count = reader.get<std::uint32_t>();
      if (state_ != State::opening || !reader.finished() || announced_ || count < paths_.size() ||
          (count == 0 && !nics_) || count > kMaxPaths) {
        break;
      }
      announced_ = count;
      return confirm_paths();
    }
    case ControlFrame::ready:
      if (state_ != State::announced) break;
      return come_up();
    case ControlFrame::goodbye: {
      ByteReader reader(payload);
      const auto why = static_cast<Errc>(reader.get<std::uint16_t>());
      const std::string text = reader.text();
      if (!reader.finished()) break;
      return lose({why == Errc::nic_lost ? why : Errc::peer_lost,
                   "the peer disconnected" + (text.empty() ? "" : ": " + text)});
    }
  }
  lose(
      {Errc::protocol_error, "unexpected control frame " + std::to_string(static_cast<int>(type))});
}

void Peer::come_up() {
  state_ = State::up;
  was_up_ = true;
  handle_->up = this;
  events_.on_up(*this);
}

// --- running ---------------------------------------------------------------------------------

// Chooses the first rank that reaches at all, even if none of its paths has room now; in it, the
// path whose NIC has least to do.
Path* Peer::path_for(const Operation& operation, bool counted) {
  if (choices_.size() == 1) {
    Path* const only = choices_.front();
    return only->reaches(operation) && only->has_room(operation, counted) ? only : nullptr;
  }
  Path* best = nullptr;
  auto rank = PathRank::tcp;
  if (++next_path_ >= choices_.size()) next_path_ = 0;
  for (std::size_t i = 0, at = next_path_; i < choices_.size(); ++i, ++at) {
    if (at == choices_.size()) at = 0;
    Path& path = *choices_[at];
    if (path.rank() > rank || !path.reaches(operation)) continue;
    if (path.rank() < rank) {
      rank = path.rank();
      best = nullptr;
    }
    if (path.has_room(operation, counted) && (!best || path.load_ns() < best->load_ns()))
      best = &path;
  }
  return best;
}

// Spreads a large operation over all NICs at once, by speed; a small one is not worth spreading.
std::size_t Peer::share_of(const Path& path, const Operation& operation,
                           const WriteRange& writes) const {
  constexpr std::size_t kSmallestBytes = 64u << 10;
  constexpr std::size_t kSmallestCount = 16;
  if (writes.count == 1 || path.rank() != PathRank::nic) return writes.count;
  const std::uint32_t length = std::max(operation.writes[writes.first].length, 1u);
  const std::size_t smallest = std::clamp<std::size_t>(kSmallestBytes / length, 1, kSmallestCount);
  if (writes.count <= smallest) return writes.count;
  std::uint64_t speed = 0;
  for (const Path* each : choices_) {
    if (each->rank() == PathRank::nic) speed += each->bits_per_second();
  }
  const double part = static_cast<double>(path.bits_per_second()) / static_cast<double>(speed);
  const double share = std::ceil(static_cast<double>(writes.count) * part);
  return std::clamp(static_cast<std::size_t>(share), smallest, writes.count);
}

Result<void> Peer::reaches(const Operation& operation) const {
  if (operation.nic && !nics_) {
    return Error{Errc::invalid_argument, "peer " + label() +
                                             " is not reached over NICs, so no NIC " +
                                             "can be chosen; leave nic out"};
  }
  if (nics_ && (operation.bytes == 0 || operation.source->registered())) return {};
  if (std::any_of(paths_.begin(), paths_.end(),
                  [&](const auto& path) { return path->reaches(operation); })) {
    return {};
  }
  return Error{Errc::permission_denied,
               "peer " + label() +
                   " may not read this process's registered memory, and there is no tcp path; use "
                   "memory from alloc(), or enable tcp on both sides"};
}

void Peer::submit(const OperationPtr& operation) {
  thread_.check("Peer");
  if (!nics_) {
    queue(operation);
  } else if (operation->imm && nics_->revoked_by_peer(*operation->imm)) {
    operations_.fail(operation, Errc::stale_counter,
                     refusal(Errc::stale_counter, *operation, label()).text);
  } else {
    nics_->resolve(operation);
  }
}

void Peer::queue(const OperationPtr& operation) {
  const auto reaches_memory = [&] {
    const RemoteRegion& region = *operation->destination;
    return region.windowed || std::any_of(region.keys.begin(), region.keys.end(),
                                          [](const RemoteKey& key) { return key.valid; });
  };
  if (operation->destination && paths_.empty() && !reaches_memory()) {
    return operations_.fail(
        operation, Errc::permission_denied,
        "no NIC of peer " + label() +
            " can write to the destination region, and there is no tcp path; use host "
            "memory there, or enable tcp on both sides");
  }
  if (operation->queued) return;
  if (backlog_.empty() && post(operation) == Posted::all) return;
  operation->queued = true;
  backlog_.push_back(operation);
}

Peer::Posted Peer::post(const OperationPtr& operation) {
  const auto& source = operation->source;
  if (source && source->gpu() && source->gpu()->failure()) {
    operations_.fail(operation, Errc::gpu_lost, source->gpu()->failure()->text);
    return Posted::all;
  }
  while (operation->wants_post()) {
    WriteRange writes = operation->next();
    Path* const path =
        writes.count > 0 ? path_for(*operation, operation->imm && writes.counted) : nullptr;
    if (!path) {
      const bool alone = writes.count == 0 || operation->nic ||
                         (operation->destination && operation->destination->windowed);
      return alone ? Posted::alone : Posted::waits;
    }
    writes.count = operation->fill_group(writes, share_of(*path, *operation, writes));
    const std::size_t posted = path->post(operation, writes);
    if (posted == 0) return Posted::waits;
    operation->took(posted);
    events_.on_posted(posted);
  }
  return Posted::all;
}

void Peer::pump() {
  thread_.check("Peer");
  for (std::size_t i = 0; i < backlog_.size();) {
    const OperationPtr operation = backlog_[i];
    const Posted posted = post(operation);
    if (posted == Posted::waits) return;
    if (posted == Posted::alone) {
      ++i;  // others need not wait
      continue;
    }
    operation->queued = false;
    backlog_.erase(backlog_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Peer::close_paths(std::function<void()> then) {
  thread_.check("Peer");
  set_lost();
  choices_.clear();
  paths_.clear();
  nics_ ? nics_->shut(std::move(then)) : then();
}

void Peer::send_nic_frame(NicFrame type, std::string payload) {
  send_frame(static_cast<ControlFrame>(type), payload);
}

void Peer::send_message(std::string_view data) {
  thread_.check("Peer");
  const std::uint64_t charge = message_charge(data.size());
  if (state_ == State::up) return send_frame(ControlFrame::message, data, charge);
  handle_->queued_message_bytes -= charge;
}

void Peer::send_frame(ControlFrame type, std::string_view payload, std::uint64_t charge) {
  if (stream_->unsent() > kMaxUnsentBytes) {
    return lose({Errc::backpressure, "it does not read what it is sent"});
  }
  const FrameHead head{
      .size = static_cast<std::uint32_t>(payload.size()), .type = type, .reserved = {}};
  std::string frame(reinterpret_cast<const char*>(&head), sizeof head);
  frame.append(payload);
  charges_.push_back(charge);
  stream_->write(std::move(frame));
}

void Peer::on_sent() {
  handle_->queued_message_bytes -= charges_.front();
  charges_.pop_front();
}

void Peer::tick(std::uint64_t now, std::uint64_t stalled_ns, Duration timeout) {
  thread_.check("Peer");
  if (state_ == State::lost) return;
  patience_.forgive(stalled_ns, now);
  patience_.hear(last_input_ns_);
  pid_t pid = 0;
  for (const auto& path : paths_) {
    patience_.hear(path->last_heard_ns());
    pid = std::max(pid, path->pid());
  }
  // The acceptor relies on the initiator's heartbeats.
  if (state_ != State::up && initiator() && waiters.empty()) {
    return lose({Errc::connect_failed, trouble()});
  }
  // A peer whose heartbeats are configured slower than our timeout is not dead between two.
  const auto limit = std::max<std::uint64_t>(static_cast<std::uint64_t>(timeout.count()),
                                             3 * session_.introduction.heartbeat_ns);
  // A sleeping peer may have sent a heartbeat after its socket was read: check the socket last.
  if (patience_.ends(limit, pid, now) && !stream_->has_input()) {
    const auto ms = [](std::uint64_t ns) { return std::to_string(ns / 1'000'000) + " ms"; };
    const std::uint64_t before = patience_.longest_ns();
    return lose({Errc::peer_timeout,
                 "no heartbeat for " + ms(patience_.silence(now)) +
                     (2 * before > limit ? ", and once for " + ms(before) + " before" : "") +
                     "; the process is frozen or starved, or its host is cut off"});
  }
  for (const auto& path : paths_) path->tick(now, stalled_ns, 2 * limit);
  if (nics_) nics_->tick(now, stalled_ns);
  if (state_ == State::lost) return;
  const auto without = now - std::min(now, last_path_ns_ + stalled_ns);
  if (state_ == State::up && choices_.empty() &&
      without > static_cast<std::uint64_t>(timeout.count())) {
    return lose({Errc::nic_lost, "no NIC has had a path to it for " +
                                     std::to_string(without / 1'000'000) +
                                     " ms: " + nics_->trouble()});
  }
  if (stream_->unsent() < kHeartbeatBehind) send_frame(ControlFrame::heartbeat, {});
}

void Peer::on_input(std::string& in) {
  thread_.check("Peer");
  last_input_ns_ = now_ns();
  std::size_t at = 0;
  while (state_ != State::lost && in.size() - at >= sizeof(FrameHead)) {
    FrameHead head;
    std::memcpy(&head, in.data() + at, sizeof head);
    if (head.size > kMaxMessageBytes) {
      lose({Errc::protocol_error, "oversized control frame"});
      break;
    }
    if (in.size() - at < sizeof head + head.size) break;
    std::string payload = in.substr(at + sizeof head, head.size);
    at += sizeof head + head.size;
    handle_frame(head.type, std::move(payload));
  }
  in.erase(0, at);
}

void Peer::on_stream_lost(Error error) { lose({Errc::peer_lost, std::move(error.text)}); }

void Peer::say_goodbye(const Error& why) {
  send_frame(
      ControlFrame::goodbye,
      ByteWriter().put(static_cast<std::uint16_t>(why.code)).text(why.text.substr(0, 512)).take());
}

void Peer::set_lost() {
  state_ = State::lost;
  handle_->up = nullptr;
}

void Peer::lose(Error error) {
  thread_.check("Peer");
  if (state_ == State::lost) return;
  set_lost();
  events_.on_peer_lost(*this, std::move(error));
}

}  // namespace kvxfer
