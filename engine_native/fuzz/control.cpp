// The control stream of a connected peer: control frames and frames about NICs, in any order, while
// this end writes, grants, revokes, and its NICs come and go.
#include <sys/socket.h>

#include <unordered_map>

#include "bootstrap/bytes.hpp"
#include "clock.hpp"
#include "correct_peer.hpp"
#include "group/peer.hpp"
#include "scripted_nic.hpp"
#include "targets.hpp"
#include "world.hpp"

namespace kvxfer::fuzz {
namespace {

constexpr Duration kTimeout = std::chrono::milliseconds(700);

class Connection final : private PeerEvents, private OperationBook, private NicEvents {
 public:
  explicit Connection(bool initiator) {
    for (const auto& [name, windows] : {std::pair("nic0", false), std::pair("nic1", true)}) {
      NicEvents& events = *this;
      auto nic = std::make_unique<ScriptedNic>(name, windows, world_.receive_context(), events);
      scripted_.push_back(nic.get());
      nics_.push_back(std::move(nic));
    }
    const auto register_everywhere = [this](const RegionPtr& region) {
      std::vector<std::shared_ptr<NicRegistration>> made;
      for (const auto& nic : nics_) made.push_back(*nic->register_memory(*region));
      region->set_registrations(std::move(made));
    };
    source_ = *MemoryRegion::wrap({}, memory_.data(), memory_.size());
    register_everywhere(source_);
    register_everywhere(world_.open);
    register_everywhere(world_.granted->granted()->of);
    int ends[2];
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
            "the system has sockets");
    socket_ = UniqueFd(ends[1]);
    auto stream = Stream::open(UniqueFd(ends[0]), world_.poller, first_owner_);
    require(static_cast<bool>(stream), "a stream can be opened");
    Session session{
        .id = {}, .key = "key", .version = kNewestVersion, .peer = {}, .introduction = {}};
    session.introduction = identity_of(1).introduction;
    session.introduction.nics = {{"their0", "simulated", 1},
                                 {"their1", "simulated", 1},
                                 {"their2", "of another network", 1}};
    PeerEvents& events = *this;
    OperationBook& operations = *this;
    peer_ = std::make_unique<Peer>(kPeer, std::move(*stream), session, events, operations);
    peer_->use_nics(nics_, initiator, {.peer_timeout = kTimeout});
    if (!initiator) return;
    peer_->address = {.host = "their host", .port = 1, .engine = {}};
    peer_->nics()->open_missing(now_);
  }

  ~Connection() {
    bool closed = false;
    peer_->close_paths([&] { closed = true; });
    for (ScriptedNic* const nic : scripted_) nic->catch_up();
    require(closed, "a peer can be closed");
    for (const auto& [id, operation] : std::exchange(operations_, {})) {
      require(operation->outstanding <= operation->writes.size(), "no write is finished twice");
    }
  }

  bool lost() const { return lost_; }

  void act(Input& input) {
    switch (input.below(16)) {
      case 0:
      case 1:
        nic_frame(input);
        break;
      case 2:
        control_frame(input);
        break;
      case 3:
        raw_frame(input);
        break;
      case 4:
        send(input.text());
        break;
      case 5:
        submit(input);
        break;
      case 6:
        for_path(input, [](ScriptedPath& path) { path.complete(); });
        break;
      case 7:
        for_path(input, [&](ScriptedPath& path) { path.arrive(world_.imm(input), 1); });
        break;
      case 8:
        for_path(input, [](ScriptedPath& path) { path.break_down(); });
        break;
      case 9:
        for_path(input, [](ScriptedPath& path) { path.open_windows(); });
        break;
      case 10:
        nic_state(input);
        break;
      case 11:
        grant_or_revoke(input);
        break;
      case 12:
        now_ += input.get<std::uint16_t>() * 1'000'000ull;
        peer_->tick(now_, 0, kTimeout);
        break;
      case 13:
        cancel(input);
        break;
      case 14:
        drain();
        break;
      default:
        peer_->nics()->reset("the fuzzer wants it");
    }
    step();
  }

 private:
  // --- the peer's end of the stream
  void send(std::string_view bytes) {
    (void)!::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  void send_frame(std::uint8_t type, std::string_view payload) {
    const auto size = static_cast<std::uint32_t>(payload.size());
    send(ByteWriter().put(size).put(type).put(std::array<std::uint8_t, 3>{}).take() +
         std::string(payload));
  }
  void raw_frame(Input& input) {
    const std::uint8_t type = input.byte();
    send_frame(type, input.text());
  }
  void control_frame(Input& input) {
    switch (input.below(5)) {
      case 0:
        return send_frame(1, {});
      case 1:
        return send_frame(2, input.text());
      case 2:
        return send_frame(3, ByteWriter().put(static_cast<std::uint32_t>(input.number())).take());
      case 3:
        return send_frame(4, {});
      default:
        return send_frame(
            5,
            ByteWriter().put(static_cast<std::uint16_t>(input.number())).text(input.text()).take());
    }
  }
  void nic_frame(Input& input) {
    const auto type = static_cast<NicFrame>(16 + input.below(13));
    const auto path = static_cast<PathId>(input.number());
    ByteWriter frame;
    switch (type) {
      case NicFrame::path_open:
        frame.put(path).put(std::uint32_t{input.byte()}).put(std::uint32_t{input.byte()});
        frame.text(endpoint(input));
        break;
      case NicFrame::path_opened:
        frame.put(path).put(static_cast<std::uint16_t>(input.number())).text(endpoint(input));
        break;
      case NicFrame::path_ready:
        frame.put(path);
        break;
      case NicFrame::path_close: {
        frame.put(path).text(input.text()).put(input.byte());
        const std::size_t count = input.below(4);
        frame.put(input.byte() == 0xff ? input.get<std::uint32_t>()
                                       : static_cast<std::uint32_t>(count));
        for (std::size_t i = 0; i < count; ++i) frame.put(world_.imm(input)).put(input.number());
        break;
      }
      case NicFrame::nic_state:
        frame.put(NicMask{input.number()});
        break;
      case NicFrame::resolve:
        frame.put(world_.key(input));
        break;
      case NicFrame::region: {
        frame.put(their_key(input)).put(static_cast<std::uint16_t>(input.number()));
        frame.put(input.number()).put(input.flag() ? world_.imm(input) : Imm{0});
        frame.put(input.byte()).put(static_cast<std::uint32_t>(input.number()));
        const std::size_t count = input.below(4);
        frame.put(input.byte() == 0xff ? input.get<std::uint16_t>()
                                       : static_cast<std::uint16_t>(count));
        for (std::size_t i = 0; i < count; ++i) {
          frame.put(input.byte()).put(input.number()).put(input.number());
        }
        break;
      }
      case NicFrame::region_gone:
        frame.put(their_key(input));
        break;
      case NicFrame::revoke:
        frame.put(world_.imm(input)).put(input.byte());
        break;
      case NicFrame::revoked:
        frame.put(world_.imm(input));
        break;
      case NicFrame::credit:
        frame.put(path).put(input.number());
        break;
      case NicFrame::window:
        frame.put(their_key(input)).put(path).put(input.number()).put(input.number());
        break;
      case NicFrame::path_stop:
        frame.put(path).text(input.text()).put(input.byte()).put(input.number());
        break;
    }
    send_frame(static_cast<std::uint8_t>(type), frame.take());
  }
  static std::string endpoint(Input& input) {
    if (input.flag()) return std::string(input.text());
    // The endpoint of a scripted NIC's path, with one byte changed.
    std::string bytes(32, '\0');
    bytes[8] = static_cast<char>(input.byte());
    bytes[14] = 3;
    bytes[input.below(bytes.size())] ^= static_cast<char>(input.byte());
    return bytes;
  }
  static std::uint64_t their_key(Input& input) { return input.number() % 8; }
  void drain() {
    std::array<char, 4096> buffer;
    while (::recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT) > 0) {
    }
  }

  // --- events at this end
  template <class Act>
  void for_path(Input& input, Act act) {
    ScriptedNic& nic = *scripted_[input.below(2)];
    const std::size_t which = input.byte();
    if (!nic.paths.empty()) act(*nic.paths[which % nic.paths.size()]);
  }
  void nic_state(Input& input) {
    ScriptedNic& nic = *scripted_[input.below(2)];
    nic.refuses = input.flag();
    nic.up = input.flag();
    nic.slow = input.flag();
    if (!nic.slow) nic.catch_up();
    if (!nic.up) {
      for (ScriptedPath* path : std::vector(nic.paths)) path->break_down();
    }
    peer_->nics()->announce_nics();
  }
  void submit(Input& input) {
    RegionPtr from = input.flag() ? source_ : nullptr;
    const std::uint64_t key = their_key(input);
    const auto operation = world_.operation(input, std::move(from), key);
    operation->handle = peer_->handle();
    if (!peer_->up()) return;
    operations_.emplace(operation->submission->id, operation);
    if (const auto good = peer_->reaches(*operation); !good) {
      return fail(operation, good.error().code, good.error().text);
    }
    peer_->submit(operation);
  }
  void cancel(Input& input) {
    if (operations_.empty()) return;
    auto chosen = operations_.begin();
    std::advance(chosen, input.byte() % operations_.size());
    fail(OperationPtr(chosen->second), Errc::cancelled, "cancelled by the caller");
  }
  void grant_or_revoke(Input& input) {
    NicLink& link = *peer_->nics();
    if (input.flag() && !world_.released()) {
      return link.open_grant(
          world_.granted,
          {.length = world_.granted->size(), .imm = world_.granted_imm, .windowed = input.flag()});
    }
    const bool complete = input.flag();
    world_.release([&] { link.revoke(world_.granted_imm, complete); });
    if (complete) link.close_grants(std::vector{world_.granted});
  }
  void step() {
    world_.poller.poll(0);
    if (lost_) return;
    peer_->nics()->step(now_);
    if (peer_->has_backlog()) peer_->pump();
    for (const auto& [id, operation] : operations_) {
      require(operation->outstanding <= operation->writes.size(), "no write is finished twice");
      require(operation->posted <= operation->writes.size(), "no write is posted twice");
    }
  }

  // --- PeerEvents
  void on_up(Peer&) override {}
  void on_message(Peer&, std::string data) override {
    require(data.size() <= kMaxMessageBytes, "messages are bounded");
  }
  void on_posted(std::size_t) override {}
  void on_peer_lost(Peer&, Error) override {
    require(!lost_, "a peer is lost once");
    lost_ = true;
  }
  void share_region(Peer& peer, std::uint64_t key) override {
    const RegionPtr region = world_.regions.find(key);
    if (!region) return peer.nics()->send_region(key, Errc::unknown_region, {});
    peer.nics()->send_region(key, Errc::ok, {.length = region->size(), .keys = {{}, {}}});
  }
  void on_notice(Peer&, std::string) override {}
  void on_revoked(Peer&, Imm) override {
    if (world_.released()) peer_->nics()->close_grants(std::vector{world_.granted});
  }

  // --- OperationBook
  void fail(const OperationPtr& operation, Errc code, std::string text) override {
    operation->fail(code, std::move(text));
    settle(operation);
  }
  void settle(const OperationPtr& operation) override {
    if (!operation->done() || operations_.erase(operation->submission->id) == 0) return;
    operation->writes = {};
    operation->source.reset();
  }
  std::vector<OperationPtr> with(PeerId, Imm imm) const override {
    std::vector<OperationPtr> found;
    for (const auto& [id, operation] : operations_) {
      if (operation->imm == imm) found.push_back(operation);
    }
    return found;
  }

  // --- NicEvents
  void on_finished(const OperationPtr& operation, const WriteRange& writes,
                   const Error& error) override {
    require(writes.count <= operation->outstanding, "no write is finished twice");
    operation->finish(writes, error.code == Errc::ok);
    if (error.code != Errc::ok) operation->fail(error.code, error.text);
    settle(operation);
  }
  void on_lost(Path& path, Error error) override {
    if (peer_->nics() && peer_->nics()->owns(path)) {
      peer_->nics()->on_path_lost(path, std::move(error));
    }
  }
  void on_nic_state(NicDomain&) override {}
  void on_credit_due(NicPath& path) override { peer_->nics()->on_credit_due(path); }
  void on_refused(NicPath&, Imm imm) override { peer_->nics()->revoke(imm, false); }
  void on_window(NicPath& path, std::uint64_t grant) override {
    peer_->nics()->on_window(path, grant);
  }

  struct Nobody final : StreamOwner {
    void on_input(std::string&) override {}
    void on_sent() override {}
    void on_stream_lost(Error) override {}
  };

  World world_;
  Nobody first_owner_;
  std::array<std::byte, 4096> memory_{};
  RegionPtr source_;
  std::vector<ScriptedNic*> scripted_;
  std::vector<std::unique_ptr<NicDomain>> nics_;
  std::unordered_map<OperationId, OperationPtr> operations_;
  UniqueFd socket_;
  std::uint64_t now_ = now_ns();
  bool lost_ = false;
  std::unique_ptr<Peer> peer_;
};

}  // namespace

void control(std::string_view bytes) {
  Input input(bytes);
  Connection connection(input.flag());
  while (!input.empty() && !connection.lost()) connection.act(input);
}

}  // namespace kvxfer::fuzz
