#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

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

TEST_CASE("region descriptors survive a round trip, and garbage is refused") {
  MrDescriptor descriptor{.key = 7, .address = 9, .length = 11};
  descriptor.engine.bytes.fill(3);
  const std::string bytes = descriptor.encode();
  const auto decoded = good(MrDescriptor::decode(bytes));
  CHECK(decoded.key == 7);
  CHECK(decoded.address == 9);
  CHECK(decoded.length == 11);
  CHECK(decoded.engine == descriptor.engine);
  CHECK(!MrDescriptor::decode(bytes.substr(1)));
  CHECK(!MrDescriptor::decode(std::string(bytes.size(), 'x')));
}
