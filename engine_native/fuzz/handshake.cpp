// The handshake, as bytes in and bytes out: a stranger never gets through, and a member may send
// any introduction.
#include "bootstrap/handshake.hpp"

#include "bootstrap/bytes.hpp"
#include "correct_peer.hpp"
#include "input.hpp"
#include "targets.hpp"

namespace kvxfer::fuzz {
namespace {

const Identity& client_self() {
  static const Identity self = identity_of(1);
  return self;
}
const Identity& server_self() {
  static const Identity self = identity_of(2);
  return self;
}

void require_sound(const Introduction& introduction) {
  require(introduction.name.size() <= kMaxNameBytes, "names are short");
  require(introduction.lanes <= kMaxLanes, "lanes are bounded");
  require(introduction.heartbeat_ns <= kMaxHeartbeatNs, "heartbeats are bounded");
  require(introduction.nics.size() <= kMaxNics, "NICs are bounded");
  const auto again = Introduction::decode(introduction.encode());
  require(again && again->encode() == introduction.encode(), "an introduction reads as written");
}

// Feeds the bytes in portions. Returns true if the handshake was completed.
template <class Handshake>
bool feed(Handshake& handshake, std::string_view bytes, std::size_t portion, std::string& out) {
  std::string in;
  while (!bytes.empty()) {
    in += bytes.substr(0, portion);
    bytes.remove_prefix(std::min(portion, bytes.size()));
    const auto done = handshake.advance(in, out);
    if (!done) return false;
    if (*done) {
      require_sound(handshake.session().introduction);
      return true;
    }
  }
  return false;
}

void stranger_at_server(Input& input) {
  ServerHandshake server(server_self());
  std::string out;
  std::string hello;
  if (input.flag()) hello = ClientHandshake(client_self(), server_self().engine).hello();
  const std::size_t portion = input.byte() + 1u;
  const bool through = feed(server, hello + std::string(input.rest()), portion, out);
  require(!through, "a stranger is refused by the server");
}

void stranger_at_client(Input& input) {
  ClientHandshake client(client_self(), server_self().engine);
  std::string out;
  const std::size_t portion = input.byte() + 1u;
  require(!feed(client, input.rest(), portion, out), "a stranger is refused by the client");
}

void member_at_server(Input& input) {
  ServerHandshake server(server_self());
  std::string hello = ClientHandshake(client_self(), server_self().engine).hello();
  const std::size_t portion = input.byte() + 1u;
  std::string sent = hello;
  std::string out;
  if (!server.advance(hello, out)) return;
  const SignedReply reply = read_reply(sent, out);
  require(reply.bytes == out, "the server's reply is signed");
  const std::string body(input.rest());
  const std::string proof =
      sign_introduction(body, reply.session_key, reply.transcript, "kvxfer proof");
  const bool through = feed(server, proof, portion, out);
  require(through == (body.size() <= 16384 && Introduction::decode(body)),
          "a member gets in with a sound introduction");
}

void member_at_client(Input& input) {
  ClientHandshake client(client_self(), server_self().engine);
  const std::size_t portion = input.byte() + 1u;
  SignedReply reply = sign_reply(client.hello(), server_self().engine);
  std::string in = reply.bytes;
  std::string proof;
  const auto replied = client.advance(in, proof);
  require(replied && !*replied, "the client takes a signed reply");
  const std::string transcript =
      reply.transcript + proof.substr(proof.size() - client_self().introduction.encode().size());
  const std::string body(input.rest());
  const std::string accept =
      sign_introduction(body, reply.session_key, transcript, "kvxfer accept");
  std::string out;
  const bool through = feed(client, accept, portion, out);
  require(through == (body.size() <= 16384 && Introduction::decode(body)),
          "a member is taken with a sound introduction");
}

void further_connections(Input& input) {
  const std::string key(input.text());
  const LaneHello lane{.session = input.get<SessionId>(), .lane = input.get<std::uint32_t>()};
  const std::string own = lane.encode(key);
  require(hello_kind(own) == HelloKind::lane && lane_hello_valid(own, key), "own hellos are valid");
  const LaneHello read = decode_lane_hello(own);
  require(read.session == lane.session && read.lane == lane.lane, "a hello reads as written");
  std::string hello(input.rest());
  (void)hello_kind(hello);
  hello.resize(kHelloBytes);
  (void)hello_kind(hello);
  (void)decode_lane_hello(hello);
  require(!lane_hello_valid(hello, kClusterKey), "a hello cannot be guessed");
}

void introductions(Input& input) {
  if (const auto introduction = Introduction::decode(input.rest())) require_sound(*introduction);
}

}  // namespace

void handshake(std::string_view bytes) {
  Input input(bytes);
  switch (input.below(6)) {
    case 0:
      return stranger_at_server(input);
    case 1:
      return stranger_at_client(input);
    case 2:
      return member_at_server(input);
    case 3:
      return member_at_client(input);
    case 4:
      return further_connections(input);
    default:
      return introductions(input);
  }
}

}  // namespace kvxfer::fuzz
