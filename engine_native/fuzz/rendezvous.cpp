// The rendezvous of two engines of one host: a stranger gets nowhere, a member may send any message
// with any descriptors.
#include "fabric/local/rendezvous.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "bootstrap/bytes.hpp"
#include "correct_peer.hpp"
#include "fabric/local/unix_socket.hpp"
#include "random.hpp"
#include "targets.hpp"
#include "world.hpp"

namespace kvxfer::fuzz {
namespace {

constexpr std::uint32_t kLocalLaneNumber = 0xffffffff;

Poller make_poller() {
  auto poller = Poller::create();
  require(static_cast<bool>(poller), "the system has descriptors");
  return std::move(*poller);
}

struct Meeting {
  Meeting() { host.wake_fd = wake.get(); }

  Poller poller = make_poller();
  UniqueFd wake{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  local::LocalHost host;
  bool ended = false;
  bool linked = false;

  local::Rendezvous::Done done() {
    return [this](local::Rendezvous&, Result<local::LocalLink> link) {
      require(!ended, "a rendezvous ends once");
      ended = true;
      linked = static_cast<bool>(link);
      // A ring that is not mapped whole ends the process here.
      if (link) link->in.slot(local::kRingSlots - 1).head.status = 1;
    };
  }
};

const Session& member_session() {
  static const Session session = [] {
    Session made;
    made.id.fill(7);
    made.key = "the key of a session";
    random_bytes(made.peer.bytes.data(), made.peer.bytes.size());  // names a socket of this host
    return made;
  }();
  return session;
}

// Returns descriptors that a peer may send for its ring: good, not sealed, too short, no memory at
// all.
std::vector<int> attached(Input& input) {
  static const auto ring = local::SharedRing::create();
  static const UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  static const UniqueFd loose(::memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  static const UniqueFd tiny(::memfd_create("tiny", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  static const bool sealed [[maybe_unused]] =
      ::ftruncate(loose.get(), sizeof(local::RingMemory)) == 0 &&
      ::fcntl(tiny.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0;
  const std::vector<int> kinds{ring->memfd(), wake.get(), loose.get(), tiny.get()};
  if (input.flag()) return {ring->memfd(), wake.get()};
  std::vector<int> chosen;
  for (std::size_t left = input.below(5); left > 0; --left) chosen.push_back(kinds[input.below(4)]);
  return chosen;
}

// Returns an address in this process, and bytes that are claimed to be there.
std::string probe(Input& input) {
  static const std::array<std::uint8_t, 16> kThere{1, 2, 3};
  if (input.flag()) return std::string(input.take(24));
  std::array<std::uint8_t, 16> bytes = kThere;
  bytes[15] = input.byte();
  return ByteWriter().put(reinterpret_cast<std::uint64_t>(kThere.data())).put(bytes).take();
}

void say(int socket, Input& input, const std::string& right) {
  const std::string bytes = input.flag() ? std::string(input.text()) : right;
  (void)local::send_message(socket, bytes, attached(input));
}

// Sends the right message in each turn, or another one.
void converse(Meeting& meeting, UniqueFd peer, Input& input,
              const std::array<std::string, 2>& right) {
  for (std::size_t i = 0; i < 4 && peer && !meeting.ended; ++i) {
    say(peer.get(), input, right[std::min<std::size_t>(i, 1)]);
    if (input.byte() == 0xff) peer.reset();
    meeting.poller.poll(0);
  }
}

void acceptor(Input& input) {
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
          "the system has sockets");
  UniqueFd peer(ends[1]);
  Meeting meeting;
  const Session& session = member_session();
  const auto find = [&session](const SessionId& id) {
    return id == session.id ? &session : nullptr;
  };
  auto rendezvous = local::Rendezvous::accept(UniqueFd(ends[0]), find, meeting.poller, meeting.host,
                                              meeting.done());
  require(static_cast<bool>(rendezvous), "a rendezvous can begin");
  const bool member = input.flag();
  const LaneHello hello{
      .session = session.id,
      .lane = input.byte() == 0xff ? input.get<std::uint32_t>() : kLocalLaneNumber};
  const std::string signed_hello = hello.encode(member ? session.key : std::string(input.text()));
  const std::string verdict = ByteWriter().put(input.byte()).take();
  const std::array<std::string, 2> right{signed_hello, verdict + probe(input)};
  converse(meeting, std::move(peer), input, right);
  require(member || !meeting.linked, "a stranger shares no memory");
}

void initiator(Input& input) {
  static const auto listener = local::listen_unix(local::socket_name(member_session().peer));
  require(static_cast<bool>(listener), "the name of a random engine is free");
  Meeting meeting;
  const Session& session = member_session();
  auto rendezvous = local::Rendezvous::start(session, meeting.poller, meeting.host, meeting.done());
  require(static_cast<bool>(rendezvous), "a rendezvous can begin");
  UniqueFd peer(::accept4(listener->get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  require(static_cast<bool>(peer), "the initiator has come");
  const bool member = input.flag();
  const std::string key = member ? session.key : std::string(input.text());
  const std::string mac(view(hmac_sha256(key, "kvxfer local", view(Mac{}))));
  const std::array<std::string, 2> right{mac + probe(input), ByteWriter().put(input.byte()).take()};
  converse(meeting, std::move(peer), input, right);
  require(member || !meeting.linked, "a stranger shares no memory");
}

}  // namespace

void rendezvous(std::string_view bytes) {
  Input input(bytes);
  input.flag() ? acceptor(input) : initiator(input);
}

}  // namespace kvxfer::fuzz
