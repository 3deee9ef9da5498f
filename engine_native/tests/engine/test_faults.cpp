// Faults as a survivor sees them. Python tests crash and freeze real processes.
#include <dirent.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cstdlib>
#include <thread>

#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

// The socket of this process that has received the largest segments.
int busiest_socket() {
  int busiest = -1;
  std::uint32_t most = 0;
  DIR* const all = ::opendir("/proc/self/fd");
  REQUIRE(all);
  while (const dirent* const each = ::readdir(all)) {
    const int fd = std::atoi(each->d_name);
    tcp_info info{};
    socklen_t size = sizeof info;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
    if (info.tcpi_rcv_mss <= most) continue;
    most = info.tcpi_rcv_mss;
    busiest = fd;
  }
  ::closedir(all);
  return busiest;
}

}  // namespace

TEST_SUITE_BEGIN("conformance");

TEST_CASE("tcp: a lane whose packets are lost ends its peer, even if heartbeats arrive") {
  auto options = options_for("tcp", "reader");
  options.tuning.lanes = 1;
  TestEngine reader(options);
  options.name = "writer";
  options.peer_timeout = std::chrono::milliseconds(300);
  TestEngine writer(options);
  const PeerId to_reader = writer.connect_to(reader);
  const auto source = good(writer->allocate(1u << 20));
  const auto destination = good(reader->allocate(1u << 20));
  write_and_count(writer, to_reader, reader, source, destination, {.length = 1u << 20});
  sock_filter none = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog lose_all{.len = 1, .filter = &none};
  REQUIRE(::setsockopt(busiest_socket(), SOL_SOCKET, SO_ATTACH_FILTER, &lose_all,
                       sizeof lose_all) == 0);
  const auto lost = good(writer->write(to_reader, source, destination->descriptor(),
                                       {.length = 1u << 20}, {.timeout = kDeadline}));
  const Completion ended = writer.await(Kind::write, lost.id);
  CHECK(ended.code == Errc::peer_timeout);
  CHECK_MESSAGE(ended.text.find("has acknowledged nothing for") != std::string::npos, ended.text);
}

TEST_CASE("a peer that closes ends all operations with peer-lost and is then unknown") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    TestEngine writer(options_for(fabric, "writer"));
    const auto source = good(writer->allocate(64u << 20));
    std::vector<OperationId> operations;
    PeerId peer = 0;
    {
      TestEngine reader(options_for(fabric, "reader"));
      peer = writer.connect_to(reader);
      const auto destination = good(reader->allocate(64u << 20));
      const auto submit = [&](const WatchFor& after) {
        operations.push_back(
            good(writer->write(peer, source, destination->descriptor(), {.length = 64u << 20},
                               {.timeout = kDeadline, .after = after}))
                .id);
      };
      for (int i = 0; i < 20; ++i) submit({});
      submit({TransferEngine::watch_word(), 1});  // is under way, however fast the others are
    }
    bool lost = false;
    for (const auto id : operations) {
      const auto done = writer.await(Kind::write, id);
      CHECK((done.code == Errc::ok || done.code == Errc::peer_lost));
      lost = lost || done.code == Errc::peer_lost;
    }
    CHECK(lost);
    const auto down = writer.await(Kind::peer_down);
    CHECK(down.peer == peer);
    CHECK(down.code == Errc::peer_lost);
    CHECK(down.text.find("'reader'") != std::string::npos);
    const auto late = writer->write_imm(peer, 1, {.timeout = kDeadline});
    REQUIRE(!late);
    CHECK(late.error().code == Errc::peer_lost);
    CHECK(writer->stats().peers == 0);
  }
}

TEST_CASE("a write that is held back ends with its peer, whenever it was submitted") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    TestEngine writer(options_for(fabric, "writer"));
    auto reader = std::make_unique<TestEngine>(options_for(fabric, "reader"));
    const PeerId peer = writer.connect_to(*reader);
    const auto word = TransferEngine::watch_word();
    std::thread closing([&] { reader.reset(); });
    std::vector<OperationId> operations;
    while (true) {
      const auto submitted = writer->write_imm(peer, 1, {.timeout = kDeadline, .after = {word, 1}});
      if (submitted) {
        operations.push_back(submitted->id);
        if (operations.size() > 5000) std::this_thread::sleep_for(std::chrono::microseconds(50));
      } else if (submitted.error().code == Errc::peer_lost) {
        break;
      }
    }
    closing.join();
    for (const auto id : operations) {
      const auto done = writer.await(Kind::write, id);
      REQUIRE_MESSAGE(done.code == Errc::peer_lost, done.text);
    }
  }
}

TEST_CASE("after fence returned, nothing of the peer lands") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const auto source = good(pair.writer->allocate(32u << 20));
    const auto destination = good(pair.reader->allocate(32u << 20));
    std::fill_n(source->host(), source->size(), std::byte{0x77});
    const auto submitted =
        good(pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                {.length = 32u << 20}, {.timeout = kDeadline}));
    good(pair.reader->fence(pair.to_writer));
    std::fill_n(destination->host(), destination->size(), std::byte{0x11});
    const auto done = pair.writer.await(Kind::write, submitted.id);
    CHECK((done.code == Errc::peer_lost || done.code == Errc::ok));
    std::size_t changed = 0;
    for (std::size_t i = 0; i < destination->size(); ++i) {
      changed += destination->host()[i] != std::byte{0x11};
    }
    CHECK(changed == 0);
    CHECK(pair.reader.await(Kind::peer_down).code == Errc::peer_lost);
    CHECK(!pair.reader->fence(pair.to_writer));
    // Both may connect again.
    CHECK(pair.writer.await(Kind::peer_down).code == Errc::peer_lost);
    CHECK(pair.writer.connect_to(pair.reader) != pair.to_reader);
  }
}

TEST_CASE("a closed engine ends its operations and refuses later calls") {
  Pair pair("tcp");
  const auto source = good(pair.writer->allocate(64u << 20));
  const auto destination = good(pair.reader->allocate(64u << 20));
  const auto submitted = good(pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                                 {.length = 64u << 20}, {.timeout = kDeadline}));
  pair.writer->close();
  const auto done = pair.writer.await(Kind::write, submitted.id);
  CHECK((done.code == Errc::engine_closed || done.code == Errc::ok));
  const auto id = pair.writer->connect(pair.reader->address(), kDeadline);
  CHECK(pair.writer.await(Kind::connect, id).code == Errc::engine_closed);
  good(pair.writer->deregister(source));
  pair.writer->release_counter(1);
  pair.writer->close();

  const auto refused = [](const auto& result) {
    return !result && result.error().code == Errc::engine_closed;
  };
  TransferEngine& closed = *pair.writer;
  std::byte byte{};
  CHECK(refused(closed.allocate(4096)));
  CHECK(refused(closed.register_memory(&byte, 1)));
  CHECK(refused(closed.allocate_counter()));
  CHECK(refused(closed.expect(1, 1)));
  CHECK(refused(closed.subscribe(1)));
  CHECK(refused(closed.grant(1, {})));
  CHECK(refused(closed.fence(pair.to_reader)));
  CHECK(refused(closed.send(pair.to_reader, "late")));
  CHECK(refused(closed.peer_group({&pair.to_reader, 1})));
  CHECK(refused(closed.write_imm(pair.to_reader, 1)));
  CHECK(refused(closed.write(pair.to_reader, source, destination->descriptor(), {.length = 1})));
  const std::array<std::int64_t, 1> page{0};
  CHECK(refused(
      closed.write_pages(pair.to_reader, source, destination->descriptor(),
                         {.page_length = 1, .source_pages = page, .destination_pages = page})));
}

TEST_CASE("the writes queued for one peer are bounded") {
  Pair pair("tcp");
  const auto source = good(pair.writer->allocate(4096));
  const auto destination = good(pair.reader->allocate(4096));
  // 4 Mi pages to the same place are more than may be queued at once.
  std::vector<std::int64_t> pages((4u << 20) + 1, 0);
  const auto refused = pair.writer->write_pages(
      pair.to_reader, source, destination->descriptor(),
      {.page_length = 8, .source_pages = pages, .destination_pages = pages},
      {.timeout = kDeadline});
  REQUIRE(!refused);
  CHECK(refused.error().code == Errc::backpressure);
}

TEST_CASE("deregister during close returns only when nothing reads the region any more") {
  for (int round = 0; round < 40; ++round) {
    Pair pair(round % 2 == 0 ? "tcp" : "local");
    const auto source = good(pair.writer->allocate(16u << 20));
    const auto destination = good(pair.reader->allocate(16u << 20));
    const auto submitted =
        good(pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                {.length = 16u << 20}, {.timeout = kDeadline}));
    std::thread closing([&] { pair.writer->close(); });
    good(pair.writer->deregister(source));
    // The operation's end was reported before deregister returned.
    bool ended = false;
    for (const Completion& completion : pair.writer->drain()) {
      ended = ended || (completion.kind == Kind::write && completion.id == submitted.id);
    }
    CHECK(ended);
    closing.join();
  }
}

TEST_SUITE_END();
