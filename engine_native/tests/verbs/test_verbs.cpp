// Engines on RDMA NICs: links that go down, and regions that are deregistered. The suite
// "conformance" has the cases that verbs share with other fabrics. Run by make test SUITE=verbs.
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "clock.hpp"
#include "support.hpp"
#include "verbs/verbs_bench.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

TEST_SUITE_BEGIN("verbs");

namespace {

std::vector<std::string> devices() { return options_for("verbs", "").nics; }

EngineOptions with_nics(const std::string& name, std::vector<std::string> nics) {
  auto options = options_for("verbs", name);
  options.nics = std::move(nics);
  return options;
}

std::filesystem::path device_file(const std::string& nic) {
  for (const auto& entry : std::filesystem::directory_iterator("/sys/class/infiniband_verbs")) {
    std::string name;
    std::ifstream(entry.path() / "ibdev") >> name;
    if (name == nic) return "/dev/infiniband" / entry.path().filename();
  }
  FAIL("no device file of " << nic);
  return {};
}

// Device rxe0 is on the network interface rx0.
void set_link(const std::string& nic, bool up) {
  const std::string command =
      "ip link set rx" + nic.substr(std::strlen("rxe")) + (up ? " up" : " down");
  REQUIRE(std::system(command.c_str()) == 0);  // NOLINT(concurrency-mt-unsafe)
}

struct Verbs {
  Verbs() : Verbs(options_for("verbs", "writer"), options_for("verbs", "reader")) {}
  Verbs(EngineOptions a, EngineOptions b)
      : writer(std::move(a)),
        reader(std::move(b)),
        to_reader(writer.connect_to(reader)),
        to_writer(reader.await(Kind::peer_up).peer),
        source(good(writer->allocate(kPage * kPages))),
        destination(good(reader->allocate(kPage * kPages))) {}

  Submitted submit(const std::vector<std::int64_t>& pages, Imm imm) {
    return good(writer->write_pages(to_reader, source, destination->descriptor(),
                                    same_pages(kPage, pages), {.imm = imm, .timeout = kDeadline}));
  }

  // Writes pages and calls `disturb` meanwhile; then checks every byte and the count.
  void write(Random& random, const std::function<void()>& disturb = [] {}) {
    random.fill(source->host(), source->size());
    const auto pages = random.distinct_pages(kPages * 3 / 4, kPages);
    const Imm imm = good(reader->allocate_counter());
    const auto submitted = submit(pages, imm);
    const std::uint64_t begin = random.below(submitted.immediates / 2);
    while (reader->counter_value(imm) < begin) std::this_thread::yield();
    disturb();
    const auto done = writer.await(Kind::write, submitted.id);
    CHECK_MESSAGE(done.code == Errc::ok, done.text);
    good(reader->expect(imm, submitted.immediates));
    CHECK(reader.await(Kind::counter, imm).code == Errc::ok);
    CHECK(reader->counter_value(imm) == submitted.immediates);
    for (const auto page : pages) {
      const std::size_t at = static_cast<std::size_t>(page) * kPage;
      REQUIRE(std::memcmp(source->host() + at, destination->host() + at, kPage) == 0);
    }
    reader->release_counter(imm);
  }

  TestEngine writer;
  TestEngine reader;
  PeerId to_reader;
  PeerId to_writer;
  RegionPtr source;
  RegionPtr destination;
};

}  // namespace

TEST_CASE("pages with immediates arrive over 1, 2 and 4 devices") {
  if (skipped_without_verbs()) return;
  Random random;
  CAPTURE(random.seed);
  const auto all = devices();
  REQUIRE(!all.empty());
  for (const std::size_t count : {1U, 2U, 4U}) {
    if (count > all.size()) break;
    CAPTURE(count);
    const std::vector<std::string> some(all.begin(), all.begin() + static_cast<long>(count));
    Verbs verbs(with_nics("writer", some), with_nics("reader", some));
    CHECK(verbs.writer.await(Kind::peer_up).fabric == "verbs");
    CHECK(verbs.writer->nics().size() == count);
    CHECK(verbs.writer->nics().front().network == "roce");
    CHECK(verbs.writer->nics().front().bits_per_second > 0);
    for (int i = 0; i < 3; ++i) verbs.write(random);
  }
}

TEST_CASE("pages arrive under a traffic class and a service level") {
  if (skipped_without_verbs()) return;
  Random random;
  CAPTURE(random.seed);
  const auto marked = [](const std::string& name) {
    auto options = options_for("verbs", name);
    options.traffic_class = 106;
    options.tuning.service_level = 3;
    return options;
  };
  Verbs engines(marked("writer"), marked("reader"));
  engines.write(random);
}

TEST_CASE("pages arrive between their own devices, one and many") {
  if (skipped_without_verbs()) return;
  Random random;
  CAPTURE(random.seed);
  const auto all = devices();
  if (all.size() < 2) {
    MESSAGE("skipped: one device");
    return;
  }
  const std::vector<std::string> first{all.front()};
  const std::vector<std::string> others(all.begin() + 1, all.end());
  Verbs there(with_nics("writer", first), with_nics("reader", others));
  there.write(random);
  Verbs back(with_nics("writer", others), with_nics("reader", first));
  back.write(random);
}

TEST_CASE("writes to a region that is being deregistered are refused, later ones work") {
  if (skipped_without_verbs()) return;
  Random random;
  CAPTURE(random.seed);
  Verbs verbs;
  bool refused = false;
  for (int round = 0; round < 3; ++round) {
    const auto source = good(verbs.writer->allocate(32u << 20));
    const auto target = good(verbs.reader->allocate(32u << 20));
    const auto submitted = good(verbs.writer->write(verbs.to_reader, source, target->descriptor(),
                                                    {.length = 32u << 20}, {.timeout = kDeadline}));
    while (verbs.writer->stats().writes_sent < 32u * static_cast<unsigned>(round) + 2) {
      std::this_thread::yield();
    }
    good(verbs.reader->deregister(target));
    std::fill_n(target->host(), target->size(), std::byte{0x11});
    const auto done = verbs.writer.await(Kind::write, submitted.id);
    CHECK_MESSAGE((done.code == Errc::unknown_region || done.code == Errc::ok), done.text);
    refused = refused || done.code == Errc::unknown_region;
    CHECK(std::all_of(target->host(), target->host() + target->size(),
                      [](std::byte byte) { return byte == std::byte{0x11}; }));
    verbs.write(random);
  }
  CHECK(refused);
}

TEST_CASE("a link that goes down and comes back under load loses and repeats nothing") {
  if (skipped_without_verbs()) return;
  const auto all = devices();
  if (all.size() < 2) {
    MESSAGE("skipped: one device");
    return;
  }
  Random random;
  CAPTURE(random.seed);
  // Two devices are the ends of one cable, so both go down.
  Verbs verbs;
  for (int round = 0; round < 3; ++round) {
    CAPTURE(round);
    const std::string nic = all[random.below(all.size())];
    verbs.write(random, [&] {
      set_link(nic, false);
      std::this_thread::sleep_for(std::chrono::milliseconds(random.below(300)));
      set_link(nic, true);
    });
    verbs.write(random);
  }
}

TEST_CASE("the error names a peer that no NIC reaches any more") {
  if (skipped_without_verbs()) return;
  Random random;
  CAPTURE(random.seed);
  const auto all = devices();
  Verbs verbs;
  const Imm imm = good(verbs.reader->allocate_counter());
  const auto submitted = verbs.submit(random.distinct_pages(kPages / 2, kPages), imm);
  for (const auto& nic : all) set_link(nic, false);
  const auto done = verbs.writer.await(Kind::write, submitted.id);
  CHECK((done.code == Errc::nic_lost || done.code == Errc::ok));
  for (TestEngine* engine : {&verbs.writer, &verbs.reader}) {
    const auto down = engine->await(Kind::peer_down);
    CHECK(down.code == Errc::nic_lost);
    CHECK_MESSAGE(down.text.ends_with(" down"), down.text);
  }
  for (const auto& nic : all) set_link(nic, true);
  // Both connect again once a link is up.
  verbs.writer.await([](const Completion& c) { return c.text.ends_with("is usable again"); });
  verbs.reader.await([](const Completion& c) { return c.text.ends_with("is usable again"); });
  verbs.to_reader = verbs.writer.connect_to(verbs.reader);
  verbs.write(random);
}

TEST_CASE("immediates without bytes, both ways at once, never run out of receives") {
  if (skipped_without_verbs()) return;
  const std::uint64_t each = std::getenv("KVXFER_TEST_FULL") ? 500'000 : 50'000;
  Verbs pair;
  const Imm there = good(pair.reader->allocate_counter());
  const Imm back = good(pair.writer->allocate_counter());
  const std::uint64_t begin = now_ns();
  const auto send = [&](TestEngine& from, PeerId to, Imm imm) {
    std::uint64_t sent = 0;
    while (sent < each) {
      const auto submitted = from->write_imm(to, imm, {.timeout = std::chrono::minutes(9)});
      if (submitted) {
        ++sent;
      } else {
        REQUIRE(submitted.error().code == Errc::backpressure);
        std::this_thread::yield();
      }
      for (const auto& completion : from->drain()) {
        if (completion.kind == Kind::write) REQUIRE(completion.code == Errc::ok);
      }
    }
  };
  std::thread other([&] { send(pair.reader, pair.to_writer, back); });
  send(pair.writer, pair.to_reader, there);
  other.join();
  good(pair.reader->expect(there, each));
  good(pair.writer->expect(back, each));
  CHECK(pair.reader.await(Kind::counter, there, std::chrono::minutes(9)).code == Errc::ok);
  CHECK(pair.writer.await(Kind::counter, back, std::chrono::minutes(9)).code == Errc::ok);
  MESSAGE(static_cast<std::uint64_t>(static_cast<double>(2 * each) * 1e9 /
                                     static_cast<double>(now_ns() - begin))
          << " immediates a second");
}

TEST_CASE("idle engines use next to no processor time") {
  if (skipped_without_verbs()) return;
  Random random;
  Verbs verbs;
  verbs.write(random);
  CHECK(comes_to_rest());  // an engine that spins would use a whole core
}

TEST_CASE("nothing of a fenced peer lands, and it may come back") {
  if (skipped_without_verbs()) return;
  Random random;
  CAPTURE(random.seed);
  Verbs verbs;
  for (int round = 0; round < 10; ++round) {
    CAPTURE(round);
    std::fill_n(verbs.source->host(), verbs.source->size(), std::byte{0x77});
    const Imm imm = good(verbs.reader->allocate_counter());
    const auto submitted = verbs.submit(random.distinct_pages(kPages, kPages), imm);
    const std::uint64_t begin = random.below(submitted.immediates / 2);
    while (verbs.reader->counter_value(imm) < begin) std::this_thread::yield();
    good(verbs.reader->fence(verbs.to_writer));
    std::fill_n(verbs.destination->host(), verbs.destination->size(), std::byte{0x11});
    const std::uint64_t counted = verbs.reader->counter_value(imm);
    const auto done = verbs.writer.await(Kind::write, submitted.id);
    CHECK((done.code == Errc::peer_lost || done.code == Errc::ok));
    CHECK(std::all_of(verbs.destination->host(),
                      verbs.destination->host() + verbs.destination->size(),
                      [](std::byte byte) { return byte == std::byte{0x11}; }));
    CHECK(verbs.reader->counter_value(imm) == counted);
    verbs.reader->release_counter(imm);
    verbs.writer.await(Kind::peer_down);
    verbs.reader.await(Kind::peer_down);
    verbs.to_reader = verbs.writer.connect_to(verbs.reader);
    verbs.to_writer = verbs.reader
                          .await([&](const Completion& c) {
                            return c.kind == Kind::peer_up && c.peer != verbs.to_writer;
                          })
                          .peer;
    verbs.write(random);
  }
}

TEST_CASE("memory beyond the limit of locked memory is refused with its remedy") {
  if (skipped_without_verbs()) return;
  TestEngine engine(options_for("verbs", "engine"));
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_MEMLOCK, &before) == 0);
  rlimit low = before;
  low.rlim_cur = 64u << 10;
  REQUIRE(::setrlimit(RLIMIT_MEMLOCK, &low) == 0);
  std::optional<Error> refused;
  // Capabilities belong to a thread; with CAP_IPC_LOCK the limit would not apply.
  std::thread([&] {
    __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    std::array<__user_cap_data_struct, 2> none{};
    if (::syscall(SYS_capset, &header, none.data()) != 0) return;
    const auto region = engine->allocate(8u << 20);
    if (!region) refused = region.error();
  }).join();
  REQUIRE(::setrlimit(RLIMIT_MEMLOCK, &before) == 0);
  REQUIRE(refused);
  CHECK(refused->code == Errc::permission_denied);
  for (const char* part : {"8388608", "65536", "ulimit -l unlimited", "IPC_LOCK"}) {
    CHECK_MESSAGE(refused->text.find(part) != std::string::npos, refused->text);
  }
}

TEST_CASE("a notice names a device that this process may not open, and the others are used") {
  if (skipped_without_verbs()) return;
  auto options = options_for("verbs", "engine");
  options.verbs = FabricUse::if_available;
  options.tcp = true;
  const std::string closed = options.nics.front();
  const auto file = device_file(closed);
  const auto before = std::filesystem::status(file).permissions();
  std::filesystem::permissions(file, std::filesystem::perms::none);
  std::unique_ptr<TransferEngine> engine;
  // Capabilities belong to a thread; with CAP_DAC_OVERRIDE the mode would not apply.
  std::thread([&] {
    __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    std::array<__user_cap_data_struct, 2> own{};
    if (::syscall(SYS_capget, &header, own.data()) != 0) return;
    own[0].permitted = own[0].effective &= ~(1u << CAP_DAC_OVERRIDE);
    if (::syscall(SYS_capset, &header, own.data()) != 0) return;
    auto made = TransferEngine::create(options);
    if (made) engine = std::move(*made);
  }).join();
  std::filesystem::permissions(file, before);
  REQUIRE(engine);
  CHECK(engine->nics().size() == options.nics.size() - 1);
  const auto completions = engine->drain();
  REQUIRE(completions.size() == 1);
  CHECK(completions[0].kind == Kind::notice);
  for (const std::string& part : {"NIC " + closed, file.string(), std::string("group rdma")}) {
    CHECK_MESSAGE(completions[0].text.find(part) != std::string::npos, completions[0].text);
  }
}

TEST_CASE("regions are deregistered, even right after their grants have ended") {
  if (skipped_without_verbs()) return;
  Verbs verbs;
  const auto registered = [] {
    // "rxe0: pd 2 cq 2 qp 2 cm_id 0 mr 5 …", a line for each device.
    FILE* const pipe = ::popen("rdma resource show | grep -o ' mr [0-9]*'", "r");  // NOLINT
    REQUIRE(pipe);
    int sum = 0;
    int one = 0;
    while (std::fscanf(pipe, " mr %d", &one) == 1) sum += one;  // NOLINT(cert-err34-c)
    ::pclose(pipe);
    return sum;
  };
  const int before = registered();
  REQUIRE(before > 0);
  for (int round = 0; round < 50; ++round) {
    const auto region = good(verbs.reader->allocate(kPage * 16));
    const Imm imm = good(verbs.reader->allocate_counter(verbs.to_writer));
    const RegionRange range{region, 0, kPage * 16};
    const auto granted = good(verbs.reader->grant(imm, {&range, 1})).front();
    const auto submitted = good(verbs.writer->write(verbs.to_reader, verbs.source, granted,
                                                    {.length = kPage * 16}, {.imm = imm}));
    if (round % 2 == 0) {  // else the grant is under way, or its windows are not open yet
      good(verbs.reader->expect(imm, submitted.immediates));
      CHECK(verbs.reader.await(Kind::counter, imm).code == Errc::ok);
      verbs.reader->release_counter(imm);
    }
    good(verbs.reader->deregister(region));
    (void)verbs.writer.await(Kind::write, submitted.id);
    verbs.reader->release_counter(imm);
  }
  CHECK(registered() == before);
}

TEST_SUITE_END();
