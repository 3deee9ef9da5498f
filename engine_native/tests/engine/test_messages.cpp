#include <chrono>
#include <thread>

#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

TEST_SUITE_BEGIN("conformance");

TEST_CASE("messages arrive whole, in order, both ways") {
  for (const std::string& fabric : EachFabric()) {
    Pair pair(fabric);
    std::vector<std::string> sent;
    for (std::size_t i = 0; i < 200; ++i) sent.emplace_back(i * i * 4, static_cast<char>(i));
    for (const auto& text : sent) good(pair.writer->send(pair.to_reader, text));
    for (const auto& text : sent) REQUIRE(pair.reader.await(Kind::message).data == text);
    good(pair.reader->send(pair.to_writer, "back"));
    CHECK(pair.writer.await(Kind::message).data == "back");
  }
}

TEST_CASE("a message over the limit, or to an unknown peer, is refused") {
  Pair pair("tcp");
  const auto large = pair.writer->send(pair.to_reader, std::string(kMaxMessageBytes + 1, 'x'));
  REQUIRE(!large);
  CHECK(large.error().code == Errc::message_too_large);
  good(pair.writer->send(pair.to_reader, std::string(kMaxMessageBytes, 'x')));
  CHECK(pair.reader.await(Kind::message).data.size() == kMaxMessageBytes);
  const auto nobody = pair.writer->send(pair.to_reader + 100, "x");
  REQUIRE(!nobody);
  CHECK(nobody.error().code == Errc::peer_lost);
}

TEST_CASE("a peer whose messages are not taken is disconnected, even if they are empty") {
  auto options = options_for("tcp", "writer");
  options.peer_timeout = std::chrono::seconds(30);  // the reader is slow under a sanitizer
  TestEngine writer(options);
  options.name = "reader";
  TestEngine reader(options);
  const PeerId to_reader = writer.connect_to(reader);
  Result<void> sent;
  while (sent = writer->send(to_reader, ""), sent || sent.error().code == Errc::backpressure) {
    // Leaves a core to the reader's thread.
    if (!sent) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  // The writer may see the end before the reader has reported it.
  CHECK(reader.await(Kind::peer_down).code == Errc::backpressure);
  CHECK(reader->stats().peers_refused.by_code[static_cast<std::size_t>(Errc::backpressure)] == 1);
}

TEST_SUITE_END();
