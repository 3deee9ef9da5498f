// What a stream hears of a peer that is gone.
#include <sys/socket.h>

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "bootstrap/stream.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

struct Hearer final : StreamOwner {
  void on_input(std::string& in) override { heard += std::exchange(in, {}); }
  void on_sent() override {}
  void on_stream_lost(Error error) override { lost = std::move(error); }

  std::string heard;
  std::optional<Error> lost;
};

}  // namespace

TEST_CASE("what a peer said before it went is heard, though nothing can be sent to it any more") {
  std::array<int, 2> ends{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
  UniqueFd peer(ends[1]);
  Poller poller = good(Poller::create());
  Hearer hearer;
  const auto stream = good(Stream::open(UniqueFd(ends[0]), poller, hearer));
  poller.poll(0);  // it is connected

  const std::string words(200'000, 'w');  // more than one read takes
  REQUIRE(::send(peer.get(), words.data(), words.size(), MSG_DONTWAIT) ==
          static_cast<ssize_t>(words.size()));
  peer.reset();
  stream->write("a heartbeat");
  for (int turn = 0; turn < 20 && !hearer.lost; ++turn) poller.poll(0);
  REQUIRE(hearer.lost);
  CHECK(hearer.lost->code == Errc::peer_lost);
  const bool whole = hearer.heard == words;
  CHECK(whole);
}

TEST_CASE("a stream knows of input that it has not read") {
  std::array<int, 2> ends{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
  UniqueFd peer(ends[1]);
  Poller poller = good(Poller::create());
  Hearer hearer;
  const auto stream = good(Stream::open(UniqueFd(ends[0]), poller, hearer));
  poller.poll(0);
  CHECK_FALSE(stream->has_input());
  REQUIRE(::send(peer.get(), "beat", 4, MSG_DONTWAIT) == 4);
  CHECK(stream->has_input());
  CHECK(stream->has_input());
  poller.poll(0);
  CHECK(hearer.heard == "beat");
  CHECK_FALSE(stream->has_input());
  peer.reset();
  CHECK_FALSE(stream->has_input());  // an end is none
}
