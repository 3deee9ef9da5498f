// One RDMA NIC and its paths, without engines: wrong keys, full queues, peers at addresses that do
// not answer. On the devices of the host, and on simulated ones of the mlx5 driver.
#include <algorithm>
#include <memory>

#include "doubles/simulated_verbs.hpp"
#include "fabric/verbs/path_endpoint.hpp"
#include "support.hpp"
#include "verbs/verbs_bench.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

TEST_SUITE_BEGIN("verbs");

TEST_CASE("a wrong key ends the path with its cause, and no other path") {
  for (const std::string& fabric : verbs_fabrics()) {
    CAPTURE(fabric);
    VerbsBench bench(fabric);
    const auto source = bench.region(1u << 20);
    const auto target = bench.region(1u << 20);
    std::fill_n(target->host(), target->size(), std::byte{0x11});
    const Imm imm = good(bench.counters.allocate());
    auto bad = bench.join();
    auto fine = bench.join();
    RemoteKey wrong = bench.key(target);
    wrong.rkey += 0x100;
    const auto refused = bench.operation(source, wrong, 4, 4096, imm);
    bench.post(*bad.writer, refused);
    bench.until([&] { return bench.lost.contains(bad.writer.get()); });
    const Error& error = bench.lost[bad.writer.get()];
    CHECK(error.code == Errc::nic_lost);
    for (const char* part : {bench.nic(0).info().name.c_str(), "'bench'", "remote access error"}) {
      CHECK_MESSAGE(error.text.find(part) != std::string::npos, error.text);
    }
    bench.until([&] { return bench.lost.contains(bad.reader.get()); });
    const std::string& refusal = bench.lost[bad.reader.get()].text;
    // mlx5 reports it by an event of the device, rxe by a completion.
    const char* const cause = fabric == "mlx5" ? "where it may not" : "deregistered here";
    CHECK_MESSAGE(refusal.find(cause) != std::string::npos, refusal);
    const auto good_one = bench.operation(source, bench.key(target), 4, 4096, imm);
    bench.post(*fine.writer, good_one);
    bench.until([&] { return good_one->finished == 4 && bench.counters.value(imm) == 4; });
    bad.writer.shut();
    bad.reader.shut();
    CHECK(bad.reader->received().empty());
    CHECK(bad.writer->take_unfinished().size() == 1);
    CHECK(!bench.lost.contains(fine.writer.get()));
    CHECK(std::all_of(target->host() + 4 * 4096, target->host() + target->size(),
                      [](std::byte byte) { return byte == std::byte{0x11}; }));
  }
}

TEST_CASE("an immediate that the peer has revoked is not kept as delivered") {
  for (const std::string& fabric : verbs_fabrics()) {
    CAPTURE(fabric);
    VerbsBench bench(fabric);
    const auto source = bench.region(1u << 20);
    const auto target = bench.region(1u << 20);
    auto ends = bench.join();
    for (const bool revoked : {false, true}) {
      const Imm imm = good(bench.counters.allocate());
      const auto operation = bench.operation(source, bench.key(target), 4, 4096, imm);
      bench.post(*ends.writer, operation);
      operation->revoked = revoked;
      bench.until([&] { return operation->finished == 4; });
      CHECK(ends.writer->delivered().contains(imm) == !revoked);
    }
  }
}

TEST_CASE("the received and unfinished writes of a path are final once it is shut") {
  for (const std::string& fabric : verbs_fabrics()) {
    CAPTURE(fabric);
    VerbsBench bench(fabric);
    Random random;
    CAPTURE(random.seed);
    const auto source = bench.region(1u << 20);
    const auto target = bench.region(1u << 20);
    auto bystander = bench.join();
    for (int round = 0; round < 30; ++round) {
      CAPTURE(round);
      const Imm imm = good(bench.counters.allocate());
      auto ends = bench.join();
      const auto operation = bench.operation(source, bench.key(target), 100, 4096, imm);
      const auto aside = bench.operation(source, bench.key(target), 100, 64, imm);
      bench.post(*ends.writer, operation);
      bench.post(*bystander.writer, aside);
      const std::uint64_t some = random.below(100);
      bench.until([&] { return operation->finished + aside->finished >= some; });
      // Either end may be shut first.
      (round % 2 == 0 ? ends.reader : ends.writer).shut();
      std::fill_n(target->host() + 100 * 64, target->size() - 100 * 64, std::byte{0x11});
      (round % 2 == 0 ? ends.writer : ends.reader).shut();
      const auto received = ends.reader->received();
      const std::uint64_t came = received.empty() ? 0 : received.at(imm);
      std::size_t unfinished = 0;
      for (const auto& batch : ends.writer->take_unfinished()) unfinished += batch.writes.count;
      CHECK(operation->finished + unfinished == 100);
      // All delivered writes have arrived; more may have arrived without a completion at the
      // sender.
      CHECK(came >= operation->finished);
      bench.until([&] { return aside->finished == 100; });
      bench.until([&] { return bench.counters.value(imm) >= came + 100; });
      CHECK(bench.counters.value(imm) == came + 100);
      bystander.writer->add_credit(bystander.reader->consumed());
      if (round % 2 == 0) {
        CHECK(std::all_of(target->host() + 100 * 64, target->host() + target->size(),
                          [](std::byte byte) { return byte == std::byte{0x11}; }));
      }
    }
    CHECK(bench.lost.size() <= 30);  // paths whose other end was shut first
    CHECK(!bench.lost.contains(bystander.writer.get()));
  }
}

TEST_CASE("a NIC takes 200 paths, and one of mlx5 thousands, until it refuses with an error") {
  for (const std::string& fabric : verbs_fabrics()) {
    CAPTURE(fabric);
    VerbsBench bench(fabric);
    std::vector<BarePath> paths;
    while (fabric == "mlx5" || paths.size() < 200) {
      auto path = bench.open(0);
      if (!path) {
        CHECK(path.error().code == Errc::out_of_memory);
        CHECK_MESSAGE(path.error().text.find(bench.nic(0).info().name) != std::string::npos,
                      path.error().text);
        break;
      }
      paths.push_back(std::move(*path));
      REQUIRE(paths.size() < 10'000);
    }
    CHECK(paths.size() >= (fabric == "mlx5" ? 2'000 : 200));
    paths.pop_back();
    CHECK(bench.open(0));
  }
}

TEST_CASE("a peer whose address does not answer is refused, and others are served meanwhile") {
  if (skipped_without_verbs()) return;
  VerbsBench bench;
  const auto source = bench.region(4096);
  const auto target = bench.region(4096);
  for (int round = 0; round < 3; ++round) {
    const Imm imm = good(bench.counters.allocate());
    auto ends = bench.join();
    auto lonely = good(bench.open(0));
    auto nowhere = *verbs::PathEndpoint::decode(ends.reader->endpoint());
    nowhere.gid.raw[15] = static_cast<std::uint8_t>(200 + round);  // 10.77.0.200
    const auto refused = lonely.connect(nowhere.encode());
    REQUIRE(!refused);
    CHECK(refused.error().code == Errc::nic_lost);
    for (const char* part : {"10.77.0.20", "'bench'", "check the network"}) {
      CHECK_MESSAGE(refused.error().text.find(part) != std::string::npos, refused.error().text);
    }
    if (round == 1) lonely.shut();
    if (round == 2) lonely = {};
    auto others = bench.join();
    const auto operation = bench.operation(source, bench.key(target), 1, 64, imm);
    bench.post(*others.writer, operation);
    bench.until([&] { return operation->finished == 1 && bench.counters.value(imm) == 1; });
  }
}

TEST_CASE("a path is fenced while others wait for addresses that do not answer") {
  VerbsBench bench("mlx5");
  auto ends = bench.join();
  std::vector<BarePath> lonely;
  for (int i = 0; i < 64; ++i) lonely.push_back(good(bench.open(0)));
  const std::string device = bench.nic(0).info().name;
  const auto answer = [&device](void*) { simulated_verbs().silence(device, false); };
  simulated_verbs().silence(device, true);
  std::size_t ended = 0;  // some, on a slow machine, are refused first
  std::size_t joined = 0;
  {
    const std::unique_ptr<void, decltype(answer)> answers(&bench, answer);
    for (BarePath& path : lonely) {
      path->connect(ends.reader->endpoint(), [&](const Result<void>& good) {
        ++ended;
        joined += bool(good);
      });
    }
    ends.writer.shut();
    CHECK(joined == 0);
  }
  bench.until([&] { return ended == lonely.size(); });
}

TEST_CASE("a NIC that sleeps is woken by what arrives") {
  for (const std::string& fabric : verbs_fabrics()) {
    CAPTURE(fabric);
    VerbsBench bench(fabric);
    const auto source = bench.region(4096);
    const auto target = bench.region(4096);
    auto ends = bench.join();
    for (int round = 0; round < 20; ++round) {
      const Imm imm = good(bench.counters.allocate());
      while (!bench.nic(0).prepare_sleep()) {
      }
      const auto operation = bench.operation(source, bench.key(target), 1, 64, imm);
      bench.post(*ends.writer, operation);
      bench.poller.poll(static_cast<std::uint64_t>(kDeadline.count()));
      bench.nic(0).finish_sleep();
      bench.until([&] { return operation->finished == 1 && bench.counters.value(imm) == 1; });
    }
  }
}

TEST_SUITE_END();
