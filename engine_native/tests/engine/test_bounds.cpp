// Bounds of what a peer that sends and does not read makes this engine keep.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "bootstrap/bytes.hpp"
#include "fabric/local/source_memory.hpp"
#include "fabric/tcp/tcp_domain.hpp"
#include "support.hpp"
#include "world.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

TEST_CASE("a tcp peer that never reads the results of its writes is given up") {
  fuzz::World world;
  fuzz::Books books;
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  const UniqueFd peer(ends[1]);
  tcp::TcpDomain domain(world.poller, world.receive_context(), books, 1u << 20);
  const auto path = good(domain.open_path(UniqueFd(ends[0]), {1, "peer"}));
  tcp::FrameHeader refused{.type = static_cast<std::uint8_t>(tcp::FrameType::writes)};
  refused.count = 1;  // no bytes, no immediate, no such region
  const std::string frame = ByteWriter().put(refused).take();
  std::size_t sent = 0;
  while (!books.lost && sent < 1u << 18) {
    while (::send(peer.get(), frame.data(), frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) ++sent;
    world.poller.poll(0);
    domain.poll();
  }
  CHECK(books.lost);
  CHECK(sent < 1u << 18);
}

TEST_CASE("a peer of this host shares a bounded number of regions") {
  local::SourceMemory memory(::getpid(), UniqueFd());
  const auto share = [&](std::uint32_t number) {
    UniqueFd memfd(::memfd_create("shared", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(::ftruncate(memfd.get(), 4096) == 0);
    REQUIRE(::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    return memory.add_region(number, std::move(memfd), 4096);
  };
  for (std::uint32_t number = 0; number < 8192; ++number) REQUIRE(share(number));
  CHECK(share(7));  // replaces a region
  const auto refused = share(8192);
  REQUIRE(!refused);
  CHECK(refused.error().code == Errc::backpressure);
}
