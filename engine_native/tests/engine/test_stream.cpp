// Input of a stream whose peer has ended.
#include <sys/socket.h>

#include <array>
#include <memory>
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

// A stream and the socket of its peer.
struct Connected {
  Connected() {
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
    peer = UniqueFd(ends[1]);
    stream = good(Stream::open(UniqueFd(ends[0]), poller, hearer));
    poller.poll(0);
  }

  std::array<int, 2> ends{};
  UniqueFd peer;
  Poller poller = good(Poller::create());
  Hearer hearer;
  std::unique_ptr<Stream> stream;
};

}  // namespace

TEST_CASE("what a peer sent before it ended is read, even if nothing can be sent to it any more") {
  Connected c;

  const std::string words(200'000, 'w');  // more than one read takes
  REQUIRE(::send(c.peer.get(), words.data(), words.size(), MSG_DONTWAIT) ==
          static_cast<ssize_t>(words.size()));
  c.peer.reset();
  c.stream->write("a heartbeat");
  for (int turn = 0; turn < 20 && !c.hearer.lost; ++turn) c.poller.poll(0);
  REQUIRE(c.hearer.lost);
  CHECK(c.hearer.lost->code == Errc::peer_lost);
  const bool whole = c.hearer.heard == words;
  CHECK(whole);
}

TEST_CASE("a stream reports input that it has not read") {
  Connected c;
  CHECK_FALSE(c.stream->has_input());
  REQUIRE(::send(c.peer.get(), "beat", 4, MSG_DONTWAIT) == 4);
  CHECK(c.stream->has_input());
  CHECK(c.stream->has_input());
  c.poller.poll(0);
  CHECK(c.hearer.heard == "beat");
  CHECK_FALSE(c.stream->has_input());
  c.peer.reset();
  CHECK_FALSE(c.stream->has_input());  // the end is not input
}
