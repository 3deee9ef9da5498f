#include <cstring>

#include "bootstrap/handshake.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

Identity identity(std::uint8_t id, const std::string& key) {
  Identity self{.cluster_key = key, .introduction = {.name = "engine", .host = "h", .lanes = 2}};
  self.engine.bytes.fill(id);
  return self;
}

struct Exchange {
  Identity a = identity(1, "the shared cluster key");
  Identity b = identity(2, "the shared cluster key");
};

}  // namespace

TEST_CASE("two engines with one key get the same session, byte by byte") {
  Exchange e;
  ClientHandshake client(e.a, e.b.engine);
  ServerHandshake server(e.b);
  std::string to_server = client.hello();
  std::string to_client, server_in, client_in;
  bool client_done = false;
  bool server_done = false;
  while (!client_done || !server_done) {
    REQUIRE((!to_server.empty() || !to_client.empty()));
    if (!to_server.empty()) {
      server_in += to_server.front();
      to_server.erase(0, 1);
      server_done = good(server.advance(server_in, to_client)) || server_done;
    }
    if (!to_client.empty() && !client_done) {
      client_in += to_client.front();
      to_client.erase(0, 1);
      client_done = good(client.advance(client_in, to_server));
    }
  }
  CHECK(client.session().id == server.session().id);
  CHECK(client.session().key == server.session().key);
  CHECK(client.session().introduction.name == "engine");
  CHECK(server.session().peer == e.a.engine);
}

TEST_CASE("two engines use the newest version that both speak") {
  Exchange e;
  // The place in the hello of the newest version that the client speaks; 0 in version 2.
  constexpr std::size_t kNewest = 7;
  for (const auto& [newest, used] :
       {std::pair{0, kOldestVersion}, {3, 3}, {4, kNewestVersion}, {255, kNewestVersion}}) {
    CAPTURE(newest);
    ClientHandshake client(e.a, e.b.engine);
    ServerHandshake server(e.b);
    std::string hello = client.hello();
    REQUIRE(hello[kNewest] == kNewestVersion);
    hello[kNewest] = static_cast<char>(newest);
    std::string reply;
    CHECK(!good(server.advance(hello, reply)));
    CHECK(server.session().version == used);
    std::uint16_t told = 0;
    std::memcpy(&told, reply.data() + 2, sizeof told);
    CHECK(told == used);
  }
  ClientHandshake client(e.a, e.b.engine);
  ServerHandshake server(e.b);
  std::string hello = client.hello();
  std::string reply, proof;
  CHECK(!good(server.advance(hello, reply)));
  std::string later = reply;
  later[2] = kNewestVersion + 1;
  const auto refused = client.advance(later, proof);
  REQUIRE(!refused);
  CHECK(refused.error().text.find("versions 2 to 4") != std::string::npos);
  CHECK(!good(client.advance(reply, proof)));
  CHECK(client.session().version == kNewestVersion);
}

TEST_CASE("any flipped bit of any message ends the handshake") {
  Random random;
  CAPTURE(random.seed);
  Exchange e;
  for (int round = 0; round < 400; ++round) {
    ClientHandshake client(e.a, e.b.engine);
    ServerHandshake server(e.b);
    std::string hello = client.hello();
    std::string reply, proof, accept;
    // Magic, version and purpose are checked before the handshake sees them.
    const int message = static_cast<int>(random.below(4));
    const auto flip = [&](std::string& bytes, std::size_t from) {
      const std::size_t at = from + random.below(bytes.size() - from);
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << random.below(8)));
    };
    if (message == 0) flip(hello, 8);
    bool refused = !server.advance(hello, reply);
    if (!refused) {
      if (message == 1) flip(reply, 0);
      const auto replied = client.advance(reply, proof);
      refused = !replied;
      if (!refused && message == 2) flip(proof, 0);
      const auto proved = refused ? Result<bool>(false) : server.advance(proof, accept);
      refused = refused || !proved || !*proved;  // a longer size would wait for a deadline
      if (!refused && message == 3) flip(accept, 0);
      const auto accepted = refused ? Result<bool>(false) : client.advance(accept, proof);
      refused = refused || !accepted || !*accepted;
    }
    CHECK(refused);
  }
}

TEST_CASE("a replayed client is refused: the server's nonce is new every time") {
  Exchange e;
  ClientHandshake client(e.a, e.b.engine);
  ServerHandshake first(e.b);
  std::string hello = client.hello();
  std::string reply, proof, accept;
  CHECK(!good(first.advance(hello, reply)));
  CHECK(!good(client.advance(reply, proof)));
  std::string copy = proof;
  CHECK(good(first.advance(copy, accept)));

  ServerHandshake second(e.b);
  std::string replayed = client.hello();
  CHECK(!good(second.advance(replayed, reply)));
  const auto answer = second.advance(proof, accept);
  REQUIRE(!answer);
  CHECK(answer.error().code == Errc::authentication_failed);
}

TEST_CASE("lane hellos are bound to their session and lane") {
  LaneHello hello{.lane = 1};
  hello.session.fill(9);
  const std::string wire = hello.encode("session key");
  CHECK(wire.size() == kHelloBytes);
  CHECK(hello_kind(wire) == HelloKind::lane);
  CHECK(decode_lane_hello(wire).lane == 1);
  CHECK(lane_hello_valid(wire, "session key"));
  CHECK(!lane_hello_valid(wire, "another key"));
  std::string other_lane = wire;
  other_lane[24] = 2;
  CHECK(!lane_hello_valid(other_lane, "session key"));
  CHECK(hello_kind("GET / HTTP/1.1\r\n\r\n") == HelloKind::unknown);
}

TEST_CASE("introductions with missing or extra bytes are refused") {
  const Introduction introduction{.name = "n", .host = "h", .local = true, .tcp = true, .lanes = 3};
  const std::string bytes = introduction.encode();
  CHECK(Introduction::decode(bytes)->lanes == 3);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    CHECK(!Introduction::decode(bytes.substr(0, size)));
  }
  CHECK(!Introduction::decode(bytes + "x"));
}
