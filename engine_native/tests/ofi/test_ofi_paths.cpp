// Paths of libfabric's NICs, without engines: their fence, their keys, their endpoints.
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>

#include "fabric/ofi/path_endpoint.hpp"
#include "fd.hpp"
#include "ofi/ofi_bench.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

TEST_SUITE_BEGIN("ofi");

TEST_CASE("ofi: a half-received write places nothing once its path or region was closed") {
  if (ofi_skipped()) return;
  constexpr std::uint32_t kPiece = 1u << 20;
  constexpr std::size_t kPieces = 12;
  enum class Closed { path, region, region_of_frozen_writer };
  for (int round = 0; round < 6; ++round) {
    const auto closed = static_cast<Closed>(round % 3);
    CAPTURE(round);
    auto options = strict_ofi_options("bench", 2);
    options.peer_timeout = std::chrono::seconds(1);  // no engine answers, so the timeout passes
    OfiBench bench(options, {});
    const auto source = bench.region(kPieces * kPiece);
    const auto destination = bench.region(kPieces * kPiece);
    std::fill_n(source->host(), source->size(), std::byte{0x77});
    const Imm imm = good(bench.counters.allocate());
    auto ends = bench.join(0);
    const auto key = bench.key_for(0, destination);
    const auto operation = bench.post(*ends.writer, source, key, kPieces, kPiece, imm);
    // Polls until a piece has begun to arrive and has not ended.
    bool half_way = false;
    bench.until([&] {
      for (std::size_t piece = 0; piece < kPieces; ++piece) {
        const std::byte* const at = destination->host() + piece * kPiece;
        half_way = half_way || (at[64] == std::byte{0x77} && at[kPiece - 1] != std::byte{0x77});
      }
      return half_way || operation->done();
    });
    if (closed == Closed::path) {
      ends.reader.shut();
    } else {
      std::atomic<bool> returned = false;
      std::jthread deregistering([&] {
        good(destination->close_registrations());
        returned = true;
      });
      const auto both = [&] { return returned.load(); };
      closed == Closed::region ? bench.until(both) : bench.until_polled(bench.reader(), both);
    }
    std::fill_n(destination->host(), destination->size(), std::byte{0x11});
    if (closed == Closed::region_of_frozen_writer && !operation->done()) {
      bench.until([&] { return bench.lost.contains(ends.reader.get()); });
    }
    bench.settle();
    CHECK(count_other_than(destination, std::byte{0x11}) == 0);
    // Nothing more is counted, and the writer learns of the rest.
    ends.reader.shut();
    const std::uint64_t counted = bench.counters.value(imm);
    const auto received = ends.reader->received().find(imm);
    CHECK((received == ends.reader->received().end() ? 0 : received->second) == counted);
    CHECK(operation->finished <= counted);
    bench.until([&] { return operation->done() || bench.lost.contains(ends.writer.get()); });
    CHECK(bench.counters.value(imm) == counted);
  }
}

TEST_CASE("ofi: a wrong key loses the path, which the error names") {
  if (ofi_skipped()) return;
  OfiBench bench(strict_ofi_options("bench", 2), {});
  const auto source = bench.region(1u << 20);
  const auto destination = bench.region(1u << 20);
  std::fill_n(source->host(), source->size(), std::byte{0x77});
  auto ends = bench.join(0);
  RemoteKey key = bench.key_for(0, destination);
  key.rkey ^= 1;
  (void)bench.post(*ends.writer, source, key, 4, kPage, std::nullopt);
  bench.until([&] { return bench.lost.contains(ends.writer.get()); });
  const std::string text = bench.lost[ends.writer.get()].text;
  CHECK(text.find("NIC lo/0 to peer 'peer 0'") != std::string::npos);
  CHECK(count_other_than(destination, std::byte{0}) == 0);
}

TEST_CASE("ofi: one key serves all peers, and none of a fenced peer's writes lands by it") {
  if (ofi_skipped()) return;
  auto options = strict_ofi_options("bench", 3);
  options.peer_timeout = std::chrono::seconds(1);  // with a closed endpoint, the timeout passes
  OfiBench bench(options, {});
  const auto source = bench.region(1u << 20);
  const auto destination = bench.region(1u << 20);
  std::fill_n(source->host(), source->size(), std::byte{0x77});
  auto fenced = bench.join(0);
  auto other = bench.join(1);
  const RemoteKey key = bench.key_for(0, destination);
  CHECK(key.rkey == bench.key_for(1, destination).rkey);
  fenced.reader.shut();
  // One write, which need not be refused: libfabric's tcp connects to the closed port 36,000 times
  // a second, and if connect() may choose that port as its own, it once connects to itself.
  (void)bench.post(*fenced.writer, source, key, 1, kPage, std::nullopt);
  bench.settle();
  CHECK(count_other_than(destination, std::byte{0}) == 0);
  const auto fine = bench.post(*other.writer, source, key, 4, kPage, std::nullopt);
  bench.until([&] { return fine->done(); });
  CHECK(count_other_than(destination, std::byte{0}) == 4 * kPage);
}

TEST_CASE(
    "ofi: immediates are counted for the path that they used, and none of a path that is shut") {
  if (ofi_skipped()) return;
  OfiBench bench(strict_ofi_options("bench", 3), {});
  const auto source = bench.region(1u << 20);
  const auto destination = bench.region(1u << 20);
  const Imm imm = good(bench.counters.allocate());
  auto first = bench.join(0);
  auto second = bench.join(1);
  const auto write = [&](NicPath& path, std::uint32_t writer, std::size_t pieces) {
    return bench.post(path, source, bench.key_for(writer, destination), pieces, 64, imm);
  };
  const auto a = write(*first.writer, 0, 100);
  const auto b = write(*second.writer, 1, 50);
  bench.until([&] { return a->done() && b->done() && bench.counters.value(imm) == 150; });
  CHECK(first.reader->received().at(imm) == 100);
  CHECK(second.reader->received().at(imm) == 50);

  // The first path is lost with immediates under way, and the same NICs are joined again.
  (void)write(*first.writer, 0, 30);
  first.reader.shut();
  const std::uint64_t landed = bench.counters.value(imm) - 150;
  first.writer.shut();
  auto again = bench.join(0);
  const auto c = write(*again.writer, 0, 20);
  bench.until([&] { return c->done(); });
  bench.settle();
  CHECK(bench.counters.value(imm) == 150 + landed + 20);
  CHECK(again.reader->received().at(imm) == 20);
}

TEST_CASE("ofi: NICs are joined again however often their path is lost") {
  if (ofi_skipped()) return;
  OfiBench bench(strict_ofi_options("bench", 3), {});
  const auto source = bench.region(kPage);
  const auto destination = bench.region(kPage);
  const auto other = bench.join(1);
  for (int round = 0; round < 40; ++round) {
    CAPTURE(round);
    auto ends = bench.join(0);
    const auto key = bench.key_for(0, destination);
    const auto operation = bench.post(*ends.writer, source, key, 1, kPage, std::nullopt);
    bench.until([&] { return operation->done(); });
    ends.reader.shut();
    ends.writer.shut();
  }
}

TEST_CASE("ofi: nothing is read for a write whose path was shut, and other paths continue") {
  if (ofi_skipped()) return;
  constexpr std::uint32_t kPiece = 1u << 20;
  constexpr std::size_t kPieces = 12;
  OfiBench bench(strict_ofi_options("bench", 3), {});
  const auto source = bench.region(kPieces * kPiece);
  const auto destination = bench.region(kPieces * kPiece);
  std::fill_n(source->host(), source->size(), std::byte{0x77});
  auto ends = bench.join(0);
  auto other = bench.join(1);
  const auto key = good(destination->registration(0)->share(0));
  const auto operation =
      bench.post(*ends.reader, source, key, kPieces, kPiece, good(bench.counters.allocate()));
  REQUIRE(!operation->done());
  ends.reader.shut();
  std::fill_n(source->host(), source->size(), std::byte{0x11});
  bench.settle();
  CHECK(std::count(destination->host(), destination->host() + destination->size(),
                   std::byte{0x11}) == 0);
  const auto fine =
      bench.post(*other.writer, source, bench.key_for(1, destination), 1, kPage, std::nullopt);
  bench.until([&] { return fine->done(); });
  CHECK(!bench.lost.contains(other.reader.get()));
}

// libfabric's tcp would read freed memory when such a connection speaks: see TcpListener.
TEST_CASE("ofi: a connection without data ends with the path, and other paths continue") {
  if (ofi_skipped()) return;
  OfiBench bench(ofi_options("bench", 2), {});
  auto other = bench.join(0);
  auto ends = bench.join(0);
  const std::string to = ofi::PathEndpoint::decode(ends.reader->endpoint())->address;
  const auto* const address = reinterpret_cast<const sockaddr*>(to.data());
  const UniqueFd silent(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(::connect(silent.get(), address, static_cast<socklen_t>(to.size())) == 0);
  bench.settle();  // the connection is accepted by then
  ends.reader.shut();
  bench.until([&] {
    char byte = 0;
    const ssize_t got = ::recv(silent.get(), &byte, 1, MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno == ECONNRESET);
  });
  const auto region = bench.region(kPage);
  const auto fine =
      bench.post(*other.writer, region, bench.key_for(0, region), 1, kPage, std::nullopt);
  bench.until([&] { return fine->done(); });
}

TEST_SUITE_END();
