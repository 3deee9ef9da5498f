// Rules that an engine keeps with a connected peer.
#include <sys/socket.h>

#include <array>

#include "group/peer.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

// The owner of a peer that is never written to.
struct Owner final : PeerEvents, OperationBook, StreamOwner {
  void on_up(Peer&) override {}
  void on_message(Peer&, std::string) override {}
  void on_posted(std::size_t) override {}
  void on_peer_lost(Peer&, Error) override {}
  void share_region(Peer&, std::uint64_t) override {}
  void on_revoked(Peer&, Imm) override {}
  void on_notice(Peer&, std::string) override {}
  void fail(const OperationPtr&, Errc, std::string) override {}
  void settle(const OperationPtr&) override {}
  std::vector<OperationPtr> with(PeerId, Imm) const override { return {}; }
  void on_input(std::string&) override {}
  void on_sent() override {}
  void on_stream_lost(Error) override {}
};

bool counts_by_group(std::uint16_t version) {
  Poller poller = good(Poller::create());
  Owner owner;
  std::array<int, 2> ends{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()) == 0);
  const UniqueFd other(ends[1]);
  StreamOwner& first_owner = owner;
  Peer peer(1, good(Stream::open(UniqueFd(ends[0]), poller, first_owner)), {.version = version},
            owner, owner);
  peer.use_nics({}, true, {});
  return peer.handle()->groups;
}

}  // namespace

TEST_CASE("a peer of a version before groups gets an immediate for every write") {
  CHECK(!counts_by_group(kGroupsVersion - 1));
  CHECK(counts_by_group(kGroupsVersion));
}
