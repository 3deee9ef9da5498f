#include <sys/socket.h>

#include "fd.hpp"
#include "net/socket.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

Completion try_connect(TestEngine& engine, const EngineAddress& address,
                       Duration timeout = kDeadline) {
  const auto id = engine->connect(address, timeout);
  return engine.await(Kind::connect, id);
}

}  // namespace

TEST_CASE("a wrong cluster key is refused on both sides, which are named") {
  auto options = options_for("tcp", "stranger");
  options.cluster_key = "another key, not the cluster's";
  TestEngine stranger(std::move(options));
  TestEngine member(options_for("tcp", "member"));
  CHECK(try_connect(stranger, member->address()).code == Errc::authentication_failed);
  CHECK(member->stats().peers == 0);
}

TEST_CASE("a restarted engine is not taken for the old one") {
  TestEngine client(options_for("tcp", "client"));
  auto options = options_for("tcp", "server");
  EngineAddress old_address;
  {
    TestEngine before(options);
    old_address = before->address();
  }
  options.port = old_address.port;
  TestEngine after(options);
  CHECK(try_connect(client, old_address).code == Errc::peer_restarted);
  CHECK(try_connect(client, after->address()).code == Errc::ok);
}

TEST_CASE("the error distinguishes a server that is no engine from one that does not answer") {
  TestEngine client(options_for("tcp", "client"));
  const auto listener = good(net::listen("127.0.0.1", 0));
  EngineAddress address{.host = "127.0.0.1", .port = good(net::local_port(listener.get()))};
  const auto silent = try_connect(client, address, std::chrono::milliseconds(50));
  CHECK(silent.code == Errc::connect_failed);
  CHECK(silent.text.find("accepts connections there, and does not answer") != std::string::npos);
  UniqueFd dropped(::accept(listener.get(), nullptr, nullptr));

  const auto id = client->connect(address, kDeadline);
  UniqueFd accepted;
  while (!accepted) accepted = UniqueFd(::accept(listener.get(), nullptr, nullptr));
  constexpr std::string_view kSays = "HTTP/1.1 400 Bad Request\r\n\r\n";  // less than a reply has
  REQUIRE(::send(accepted.get(), kSays.data(), kSays.size(), MSG_NOSIGNAL) == kSays.size());
  const auto other = client.await(Kind::connect, id);
  CHECK(other.code == Errc::connect_failed);
  CHECK(other.text.find("is no kvxfer engine") != std::string::npos);
}

TEST_CASE("an id of zeros stands for any engine there that knows the cluster key") {
  TestEngine client(options_for("tcp", "client"));
  TestEngine server(options_for("tcp", "server"));
  EngineAddress anyone = server->address();
  anyone.engine = {};
  CHECK(try_connect(client, anyone).code == Errc::ok);
  anyone.port = client->address().port;
  const auto itself = try_connect(client, anyone);
  CHECK(itself.code == Errc::invalid_argument);
  CHECK(itself.text.find("cannot connect to itself") != std::string::npos);

  auto options = options_for("tcp", "stranger");
  options.cluster_key = "another key, not the cluster's";
  TestEngine stranger(std::move(options));
  anyone.port = server->address().port;
  CHECK(try_connect(stranger, anyone).code == Errc::authentication_failed);
}

TEST_CASE("the error names an engine that is not there") {
  TestEngine client(options_for("tcp", "client"));
  EngineAddress address = client->address();
  address.engine.bytes[0] ^= 1;
  {
    TestEngine gone(options_for("tcp", "gone"));
    address.port = gone->address().port;
  }
  const auto done = try_connect(client, address);
  CHECK(done.code == Errc::connect_failed);
  CHECK(done.text.find(address.text()) != std::string::npos);
}

TEST_CASE("the short deadline of one connect does not end another to the same engine") {
  TestEngine client(options_for("tcp", "client"));
  const auto silent = good(net::listen("127.0.0.1", 0));  // takes connections, says nothing
  EngineAddress address = client->address();
  address.engine.bytes[0] ^= 1;
  address.port = good(net::local_port(silent.get()));
  const auto impatient = client->connect(address, std::chrono::milliseconds(50));
  client->connect(address, std::chrono::hours(1));
  const auto done = client.await(Kind::connect, impatient);
  CHECK(done.code == Errc::connect_failed);
  CHECK(done.text.find("took longer than allowed") != std::string::npos);
  // If the patient call had ended too, its completion would come before this one's.
  const auto later = client->connect(address, std::chrono::milliseconds(50));
  CHECK(client.await([](const Completion& c) { return c.kind == Kind::connect; }).id == later);
}

TEST_CASE("engines without a common fabric fail to connect with that reason") {
  TestEngine a(options_for("tcp", "a"));
  TestEngine b(options_for("local", "b"));
  const auto done = try_connect(a, b->address());
  CHECK(done.code == Errc::connect_failed);
  CHECK(done.text.find("fabric") != std::string::npos);
}

TEST_CASE("one host prefers local, and a second connect gives the same peer") {
  auto options = options_for("tcp", "a");
  options.local = true;
  TestEngine a(options);
  options.name = "b";
  TestEngine b(options);
  const PeerId first = a.connect_to(b);
  CHECK(a.connect_to(b) == first);
  const Completion of_a = a.await(Kind::peer_up);
  const Completion of_b = b.await(Kind::peer_up);
  CHECK(of_a.fabric == "local");
  CHECK(of_b.fabric == "local");
  // Only b was dialed.
  CHECK(of_a.id == 0);
  CHECK(of_b.id == 1);
}

TEST_CASE("unequal lane counts connect and carry writes both ways") {
  auto options = options_for("tcp", "a");
  options.tuning.lanes = 5;
  TestEngine a(options);
  options.tuning.lanes = 1;
  options.name = "b";
  TestEngine b(options);
  const PeerId to_b = a.connect_to(b);
  const PeerId to_a = b.await(Kind::peer_up).peer;
  const auto at_a = good(a->allocate(1 << 20));
  const auto at_b = good(b->allocate(1 << 20));
  const auto there =
      good(a->write(to_b, at_a, at_b->descriptor(), {.length = 1 << 20}, {.timeout = kDeadline}));
  const auto back =
      good(b->write(to_a, at_b, at_a->descriptor(), {.length = 1 << 20}, {.timeout = kDeadline}));
  CHECK(a.await(Kind::write, there.id).code == Errc::ok);
  CHECK(b.await(Kind::write, back.id).code == Errc::ok);
}

TEST_CASE("the error for a bad option names it") {
  const auto refused = [](auto change) {
    auto options = options_for("tcp", "bad");
    change(options);
    const auto engine = TransferEngine::create(options);
    REQUIRE(!engine);
    return engine.error().code;
  };
  CHECK(refused([](auto& o) { o.cluster_key = "short"; }) == Errc::invalid_argument);
  CHECK(refused([](auto& o) { o.tcp = false; }) == Errc::invalid_argument);
  CHECK(refused([](auto& o) { o.tuning.lanes = 0; }) == Errc::invalid_argument);
  CHECK(refused([](auto& o) { o.host = "not a host"; }) == Errc::invalid_argument);
  for (const int value : {-1, 256}) {
    CHECK(refused([&](auto& o) { o.traffic_class = value; }) == Errc::invalid_argument);
  }
  for (const int value : {-1, 8}) {
    CHECK(refused([&](auto& o) { o.tuning.service_level = value; }) == Errc::invalid_argument);
  }
  CHECK(refused([](auto& o) { o.peer_timeout = Duration(1); }) == Errc::invalid_argument);
  CHECK(refused([](auto& o) { o.tuning.spin = Duration(-1); }) == Errc::invalid_argument);
  CHECK(refused([](auto& o) { o.operation_timeout = Duration(0); }) == Errc::invalid_argument);
  TestEngine taken(options_for("tcp", "taken"));
  CHECK(refused([&](auto& o) { o.port = taken->address().port; }) == Errc::address_in_use);
}

TEST_CASE("an engine cannot connect to itself, and says so") {
  TestEngine alone(options_for("tcp", "alone"));
  CHECK(try_connect(alone, alone->address()).code == Errc::invalid_argument);
}

TEST_CASE("local connects succeed in any order of heartbeats and the rendezvous") {
  auto options = options_for("local", "a");
  options.tuning.heartbeat_interval = std::chrono::milliseconds(1);
  TestEngine a(options);
  options.name = "b";
  TestEngine b(options);
  for (int i = 0; i < 300; ++i) {
    const PeerId peer = a.connect_to(b);
    a->disconnect(peer);
    b.await(Kind::peer_down);
  }
}

TEST_CASE("silent strangers cannot lock a member out") {
  TestEngine server(options_for("tcp", "server"));
  TestEngine client(options_for("tcp", "client"));
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 600; ++i) {
    strangers.push_back(good(net::dial("127.0.0.1", server->address().port)));
  }
  client.connect_to(server);
}

TEST_CASE("a name that is not text is carried as bytes") {
  TestEngine a(options_for("tcp", "a"));
  TestEngine b(options_for("tcp", "\xff\xfe"));
  a.connect_to(b);
  CHECK(a.await(Kind::peer_up).text == "\xff\xfe");
}

TEST_CASE("engine addresses survive a round trip") {
  EngineAddress address{.host = "127.0.0.1", .port = 4321};
  address.engine.bytes.fill(0xab);
  CHECK(good(EngineAddress::parse(address.text())).text() == address.text());
  address.host = "fe80::1";
  CHECK(address.text().starts_with("kvx://[fe80::1]:4321/"));
  CHECK(good(EngineAddress::parse(address.text())).host == "fe80::1");
}

TEST_CASE("malformed engine addresses are refused") {
  const std::string id(32, 'a');
  for (const std::string& text :
       {std::string(), std::string("kvx://"), "kvx://host/" + id, "kvx://:1/" + id,
        "kvx://h:0/" + id, "kvx://h:65536/" + id, "kvx://h:1x/" + id, "kvx://h:1/" + id + "a",
        "kvx://h:1/" + std::string(32, 'G'), "tcp://h:1/" + id}) {
    CAPTURE(text);
    CHECK(EngineAddress::parse(text).error().code == Errc::invalid_argument);
  }
}
