#include "peer.hpp"

#include <algorithm>
#include <cstring>

#include "bootstrap/bytes.hpp"
#include "clock.hpp"

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

std::string make_label(const Session& session) {
  const std::string id = "engine " + session.peer.hex().substr(0, 8);
  const std::string& name = session.introduction.name;
  return name.empty() ? id : "'" + name + "' (" + id + ")";
}

}  // namespace

Peer::Peer(PeerId id, std::unique_ptr<Stream> stream, Session session, std::uint64_t deadline_ns,
           PeerEvents& events)
    : handle_(std::make_shared<PeerHandle>()),
      stream_(std::move(stream)),
      session_(std::move(session)),
      deadline_ns_(deadline_ns),
      events_(events),
      last_heard_ns_(now_ns()) {
  handle_->id = id;
  handle_->engine = session_.peer;
  handle_->label = make_label(session_);
  stream_->set_owner(*this);
}

std::string Peer::fabric() const {
  return paths_.empty() ? std::string() : std::string(paths_.front()->fabric());
}

// --- set-up ----------------------------------------------------------------------------------

void Peer::add_path(std::unique_ptr<Path> path, std::uint32_t lane) {
  paths_.push_back(std::move(path));
  lanes_.push_back(lane);
  confirm_paths();
}

// The announcement and the last path come over different sockets, in either order.
void Peer::confirm_paths() {
  if (state_ != State::opening || announced_ == 0 || paths_.size() != announced_) return;
  send_frame(ControlFrame::ready, {});
  come_up();
}

bool Peer::has_lane(std::uint32_t lane) const {
  return std::find(lanes_.begin(), lanes_.end(), lane) != lanes_.end();
}

void Peer::announce_paths() {
  state_ = State::announced;
  send_frame(ControlFrame::paths,
             ByteWriter().put(static_cast<std::uint32_t>(paths_.size())).take());
}

void Peer::handle_frame(ControlFrame type, std::string payload) {
  switch (type) {
    case ControlFrame::heartbeat:
      return;
    case ControlFrame::message:
      if (state_ == State::up) return events_.on_message(*this, std::move(payload));
      break;
    case ControlFrame::paths: {
      ByteReader reader(payload);
      const auto count = reader.get<std::uint32_t>();
      if (state_ != State::opening || !reader.finished() || announced_ != 0 ||
          count < paths_.size() || count == 0 || count > kMaxPaths) {
        break;
      }
      announced_ = count;
      return confirm_paths();
    }
    case ControlFrame::ready:
      if (state_ != State::announced) break;
      return come_up();
    case ControlFrame::goodbye:
      return lose({Errc::peer_lost, "the peer disconnected"});
  }
  lose(
      {Errc::protocol_error, "unexpected control frame " + std::to_string(static_cast<int>(type))});
}

void Peer::come_up() {
  state_ = State::up;
  was_up_ = true;
  events_.on_up(*this);
}

// --- running ---------------------------------------------------------------------------------

Path* Peer::path_for(const Operation& operation) {
  for (std::size_t tried = 0; tried < paths_.size(); ++tried) {
    Path& path = *paths_[next_path_++ % paths_.size()];
    if (path.has_room() && path.reaches(operation.source.get())) return &path;
  }
  return nullptr;
}

bool Peer::reaches(const MemoryRegion* source) const {
  return std::any_of(paths_.begin(), paths_.end(),
                     [&](const auto& path) { return path->reaches(source); });
}

void Peer::pump() {
  while (!backlog_.empty()) {
    const OperationPtr& operation = backlog_.front();
    if (!operation->wants_post()) {
      backlog_.pop_front();
      continue;
    }
    Path* path = path_for(*operation);
    if (!path || !path->post(operation)) return;
  }
}

void Peer::send_message(std::string_view data) {
  const std::uint64_t charge = message_charge(data.size());
  if (state_ == State::up) return send_frame(ControlFrame::message, data, charge);
  handle_->queued_message_bytes -= charge;
}

void Peer::send_frame(ControlFrame type, std::string_view payload, std::uint64_t charge) {
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
  if (state_ == State::lost) return;
  last_heard_ns_ = std::min(now, last_heard_ns_ + stalled_ns);
  for (const auto& path : paths_) last_heard_ns_ = std::max(last_heard_ns_, path->last_heard_ns());
  if (state_ != State::up && now > deadline_ns_) {
    return lose({Errc::connect_failed, "the peer did not finish the connection in time"});
  }
  const auto silent = now - std::min(now, last_heard_ns_);
  // A peer that was told to beat slower than we wait is not dead between two beats.
  const auto limit = std::max<std::uint64_t>(static_cast<std::uint64_t>(timeout.count()),
                                             3 * session_.introduction.heartbeat_ns);
  if (silent > limit) {
    return lose({Errc::peer_timeout, "no heartbeat for " + std::to_string(silent / 1'000'000) +
                                         " ms; the process is frozen or its host is cut off"});
  }
  if (stream_->unsent() < kHeartbeatBehind) send_frame(ControlFrame::heartbeat, {});
}

void Peer::on_input(std::string& in) {
  last_heard_ns_ = now_ns();
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

void Peer::say_goodbye() {
  if (state_ != State::lost) send_frame(ControlFrame::goodbye, {});
}

void Peer::lose(Error error) {
  if (state_ == State::lost) return;
  state_ = State::lost;
  events_.on_peer_lost(*this, std::move(error));
}

}  // namespace kvxfer
