// Behaviour of ConnectX hosts that Soft-RoCE does not have, on simulated devices of the mlx5
// driver: docs/nics.md has the table.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>

#include "clock.hpp"
#include "doubles/simulated_network.hpp"
#include "doubles/simulated_verbs.hpp"
#include "doubles/step_probe.hpp"
#include "fabric/verbs/verbs_device.hpp"
#include "fabric/verbs/verbs_factory.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

// Makes a host's devices after `like`; returns the options of an engine that has them all.
EngineOptions options_on(std::size_t devices, SimulatedDevice like) {
  static std::atomic<unsigned> hosts = 0;
  EngineOptions options = options_for("tcp", "host");
  options.tcp = false;
  options.peer_timeout = std::chrono::seconds(5);
  const std::string prefix = "host" + std::to_string(++hosts) + "_mlx5_";
  for (std::size_t n = 0; n < devices; ++n) {
    like.name = prefix + std::to_string(n);
    options.nics.push_back(like.name);
    simulated_verbs().add(like);
  }
  options.more_nics = std::make_shared<verbs::VerbsFactory>(simulated_verbs().library());
  return options;
}

struct Hosts {
  Hosts(const EngineOptions& ours, const EngineOptions& theirs)
      : writer(ours), reader(theirs), to_reader(writer.connect_to(reader)) {
    to_writer = reader.await(Kind::peer_up).peer;
  }
  // Two hosts, each with `devices` devices like this.
  explicit Hosts(std::size_t devices, const SimulatedDevice& like = {})
      : Hosts(options_on(devices, like), options_on(devices, like)) {}

  // Writes pages with a counter, calls `meanwhile` while they are under way, and checks every byte.
  void transfer(const std::function<void()>& meanwhile = [] {}) {
    if (!source) {
      source = good(writer->allocate(kPage * kPages));
      destination = good(reader->allocate(kPage * kPages));
    }
    Random random;
    random.fill(source->host(), source->size());
    std::memset(destination->host(), 0, destination->size());
    std::vector<std::int64_t> pages(kPages);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random.engine);
    const Imm imm = good(reader->allocate_counter(to_writer));
    const RegionRange all{destination, 0, destination->size()};
    const auto grant = good(reader->grant(imm, {&all, 1})).front();
    const auto submitted = good(writer->write_pages(
        to_reader, source, grant, same_pages(kPage, pages), {.imm = imm, .timeout = kDeadline}));
    meanwhile();
    const auto done = writer.await(Kind::write, submitted.id);
    REQUIRE_MESSAGE(done.code == Errc::ok, done.text);
    good(reader->expect(imm, submitted.immediates));
    REQUIRE(reader.await(Kind::counter, imm).code == Errc::ok);
    CHECK(std::memcmp(source->host(), destination->host(), source->size()) == 0);
    reader->release_counter(imm);
  }

  TestEngine writer;
  TestEngine reader;
  PeerId to_reader;
  PeerId to_writer = 0;
  RegionPtr source;
  RegionPtr destination;
};

// Address space without memory until it is accessed.
class Reserved {
 public:
  explicit Reserved(std::size_t size)
      : size_(size),
        data_(::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    REQUIRE(data_ != MAP_FAILED);
  }
  ~Reserved() { ::munmap(data_, size_); }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  std::size_t size_;
  void* data_;
};

}  // namespace

TEST_SUITE_BEGIN("mlx5");

TEST_CASE("a grant larger than a window uses its region's key, on the same paths") {
  Hosts hosts(2);
  const std::size_t size = (std::size_t{1} << 31) + kPage;
  const Reserved memory(size);
  const auto large = good(hosts.reader->register_memory(memory.data(), size));
  const auto source = good(hosts.writer->allocate(kPage));
  std::memset(source->host(), 0x5a, kPage);
  const std::size_t pairs = simulated_verbs().queue_pairs();
  const Imm imm = good(hosts.reader->allocate_counter(hosts.to_writer));
  const RegionRange all{large, 0, size};
  const auto grant = good(hosts.reader->grant(imm, {&all, 1})).front();
  const auto submitted = good(
      hosts.writer->write(hosts.to_reader, source, grant,
                          {.destination_offset = size - kPage, .length = kPage}, {.imm = imm}));
  const auto done = hosts.writer.await(Kind::write, submitted.id);
  CHECK_MESSAGE(done.code == Errc::ok, done.text);
  good(hosts.reader->expect(imm, submitted.immediates));
  CHECK(hosts.reader.await(Kind::counter, imm).code == Errc::ok);
  CHECK(std::memcmp(source->host(), memory.data() + size - kPage, kPage) == 0);
  CHECK(simulated_verbs().queue_pairs() == pairs);
  good(hosts.reader->deregister(large));
}

TEST_CASE("a port is used in the partition of which it is a full member, wherever that is listed") {
  Hosts(1, {.infiniband = true, .pkeys = {0x7fff, 0x0000, 0x8012}}).transfer();
  Hosts(1, {.infiniband = true, .pkeys = {0xffff}}).transfer();
}

TEST_CASE("pkey chooses a partition, and the error for an unknown one lists those of the port") {
  const SimulatedDevice port{.infiniband = true, .pkeys = {0xffff, 0x8012}};
  EngineOptions ours = options_on(1, port);
  EngineOptions theirs = options_on(1, port);
  ours.pkey = theirs.pkey = 0x12;
  Hosts(ours, theirs).transfer();

  EngineOptions wrong = options_on(1, port);
  wrong.pkey = 0x13;
  TestEngine without(wrong);
  const auto notice = without.await(Kind::notice);
  for (const char* part : {"0x0013", "0xffff", "0x8012"}) {
    CHECK_MESSAGE(notice.text.find(part) != std::string::npos, notice.text);
  }
}

TEST_CASE("engines of two partitions have no network in common") {
  TestEngine writer(options_on(1, {.infiniband = true, .pkeys = {0x8012}}));
  TestEngine reader(options_on(1, {.infiniband = true, .pkeys = {0x8013}}));
  const OperationId id = writer->connect(reader->address(), kDeadline);
  CHECK(writer.await(Kind::connect, id).code != Errc::ok);
}

TEST_CASE("a port that requires a GRH gets one, within its subnet too") {
  Hosts(1, {.infiniband = true, .grh_required = true}).transfer();
}

TEST_CASE("gid_index chooses the address, and is refused if the port has none there") {
  EngineOptions ours = options_on(1, {});
  EngineOptions theirs = options_on(1, {});
  ours.gid_index = theirs.gid_index = 1;
  Hosts(ours, theirs).transfer();

  EngineOptions wrong = options_on(1, {});
  wrong.gid_index = 9;
  TestEngine without(wrong);
  const auto notice = without.await(Kind::notice);
  CHECK_MESSAGE(notice.text.find("gid_index is 9") != std::string::npos, notice.text);
}

TEST_CASE("a network that stops for less than path_timeout costs no path") {
  EngineOptions ours = options_on(1, {});
  EngineOptions theirs = options_on(1, {});
  ours.tuning.path_timeout = theirs.tuning.path_timeout = std::chrono::seconds(20);
  Hosts hosts(ours, theirs);
  hosts.transfer();
  const std::size_t pairs = simulated_verbs().queue_pairs();
  hosts.transfer([&] {
    simulated_verbs().cut(ours.nics[0], true);
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    simulated_verbs().cut(ours.nics[0], false);
  });
  CHECK(simulated_verbs().queue_pairs() == pairs);
}

TEST_CASE("a path that delivers nothing is fenced, and other paths take its writes") {
  EngineOptions ours = options_on(2, {});
  EngineOptions theirs = options_on(2, {});
  ours.tuning.path_timeout = theirs.tuning.path_timeout = std::chrono::milliseconds(300);
  Hosts hosts(ours, theirs);
  hosts.transfer();
  hosts.transfer([&] { simulated_verbs().cut(ours.nics[1], true); });
  simulated_verbs().cut(ours.nics[1], false);
}

TEST_CASE(
    "a write that is cancelled on a path that delivers nothing costs the path, not the peer") {
  EngineOptions ours = options_on(2, {});
  EngineOptions theirs = options_on(2, {});
  ours.peer_timeout = theirs.peer_timeout = std::chrono::milliseconds(1500);
  ours.tuning.path_timeout = theirs.tuning.path_timeout = std::chrono::milliseconds(2500);
  Hosts hosts(ours, theirs);
  hosts.transfer();
  simulated_verbs().cut(ours.nics[1], true);
  const std::uint64_t before = hosts.writer->stats().writes_posted;
  const auto stuck =
      good(hosts.writer->write(hosts.to_reader, hosts.source, hosts.destination->descriptor(),
                               {.length = kPage}, {.timeout = kDeadline, .nic = 1}));
  while (hosts.writer->stats().writes_posted == before) std::this_thread::yield();
  hosts.writer->cancel(stuck.id);
  CHECK(hosts.writer.await(Kind::write, stuck.id).code == Errc::cancelled);
  hosts.transfer();
  simulated_verbs().cut(ours.nics[1], false);
}

TEST_CASE("a NIC that is down does not move others to other rails") {
  const auto rails = [] {
    EngineOptions options = options_on(0, {});
    static unsigned host = 0;
    ++host;
    for (std::uint8_t rail = 0; rail < 3; ++rail) {
      options.nics.push_back("rails" + std::to_string(host) + "_" + std::to_string(rail));
      simulated_verbs().add({.name = options.nics.back(), .rail = rail});
    }
    return options;
  };
  const EngineOptions ours = rails();
  simulated_verbs().set_link(ours.nics[0], false);
  Hosts hosts(ours, rails());
  hosts.transfer();
  simulated_verbs().set_link(ours.nics[0], true);
  hosts.transfer();
}

TEST_CASE("memory that a NIC does not deregister is not freed") {
  Hosts hosts(1);
  const std::string nic = hosts.reader->nics()[0].name;
  const auto kept = good(hosts.reader->allocate(kPage));
  simulated_verbs().refuse_deregistrations(nic, 3);  // as while a window is being closed
  good(hosts.reader->deregister(kept));
  const auto stuck = good(hosts.reader->allocate(kPage));
  simulated_verbs().refuse_deregistrations(nic, 1u << 20);
  const auto refused = hosts.reader->deregister(stuck);
  simulated_verbs().refuse_deregistrations(nic, 0);
  REQUIRE(!refused);
  CHECK(refused.error().code == Errc::nic_lost);
  CHECK_MESSAGE(refused.error().text.find(nic) != std::string::npos, refused.error().text);
  good(hosts.reader->deregister(stuck));
}

TEST_CASE("a NIC that makes and destroys paths more slowly than peers wait loses no other peer") {
  EngineOptions ours = options_on(1, {});
  EngineOptions theirs = options_on(1, {});
  ours.peer_timeout = theirs.peer_timeout = std::chrono::seconds(1);
  Hosts hosts(ours, theirs);
  hosts.transfer();
  TestEngine third(options_on(1, {}));
  const auto slow = [&](bool so) {
    simulated_verbs().delay_commands(ours.nics[0], std::chrono::milliseconds(so ? 1500 : 0));
  };
  slow(true);
  const OperationId id = third->connect(hosts.writer->address(), std::chrono::seconds(3));
  CHECK(third.await(Kind::connect, id).code == Errc::connect_failed);
  hosts.transfer();
  slow(false);
  const PeerId peer = third.connect_to(hosts.writer);
  hosts.transfer();
  slow(true);
  third->disconnect(peer);
  CHECK(hosts.writer.await(Kind::peer_down).code == Errc::peer_lost);
  hosts.transfer();
  slow(false);
}

TEST_CASE("a window that is made while its path is reset is not bound on a destroyed queue pair") {
  const EngineOptions ours = options_on(1, {});
  const EngineOptions theirs = options_on(1, {});
  Hosts hosts(ours, theirs);
  hosts.transfer();
  const auto commands_take = [](const EngineOptions& options, std::chrono::milliseconds each) {
    simulated_verbs().delay_commands(options.nics[0], each);
  };
  const auto grant_all = [&](const RegionPtr& region) {
    const RegionRange all{region, 0, region->size()};
    return good(hosts.reader->grant(good(hosts.reader->allocate_counter(hosts.to_writer)),
                                    {&all, 1}))
        .front();
  };
  const auto open = good(hosts.reader->allocate(kPage));
  const auto opening = good(hosts.reader->allocate(kPage));
  const auto granted = grant_all(open);
  const auto written = good(hosts.writer->write(hosts.to_reader, hosts.source, granted,
                                                {.length = kPage}, {.imm = granted.imm}));
  REQUIRE(hosts.writer.await(Kind::write, written.id).code == Errc::ok);
  commands_take(theirs, std::chrono::milliseconds(300));
  grant_all(opening);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the window is being made by then
  commands_take(theirs, std::chrono::milliseconds(0));
  // The reader's end is destroyed long before the writer's.
  commands_take(ours, std::chrono::milliseconds(500));
  good(hosts.reader->deregister(open));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  commands_take(ours, std::chrono::milliseconds(0));
  hosts.transfer();
}

TEST_CASE(
    "64 peers with 64 regions come and go beside a transfer, and the engine runs no command") {
  constexpr std::size_t kPeers = 64;
  constexpr std::size_t kRegions = 64;
  const SimulatedDevice like{.command = std::chrono::milliseconds(1)};
  EngineOptions ours = options_on(1, like);
  EngineOptions theirs = options_on(1, like);
  const auto probe = std::make_shared<StepProbe>(theirs.more_nics, &SimulatedVerbs::held_up_ns);
  theirs.more_nics = probe;
  const std::size_t commands = simulated_verbs().commands_of_pollers();
  Hosts hosts(ours, theirs);
  std::vector<MrDescriptor> destinations;
  std::vector<std::byte> received(kRegions * kPeers * kPage);
  for (std::size_t r = 0; r < kRegions; ++r) {
    const auto region =
        good(hosts.reader->register_memory(received.data() + r * kPeers * kPage, kPeers * kPage));
    destinations.push_back(region->descriptor());
  }
  std::size_t transfers = 0;
  std::jthread load([&](const std::stop_token& stop) {
    for (; !stop.stop_requested(); ++transfers) hosts.transfer();
  });

  struct Joining {
    explicit Joining(const EngineOptions& options) : engine(options) {}
    std::vector<std::byte> memory = std::vector<std::byte>(kRegions * kPage);
    TestEngine engine;
    OperationId connecting = 0;
    std::vector<OperationId> writes;
  };
  std::vector<std::unique_ptr<Joining>> peers;
  for (std::size_t n = 0; n < kPeers; ++n) {
    Joining& peer = *peers.emplace_back(std::make_unique<Joining>(options_on(1, like)));
    std::memset(peer.memory.data(), static_cast<int>(n + 1), peer.memory.size());
    peer.connecting = peer.engine->connect(hosts.reader->address(), kDeadline);
  }
  for (std::size_t n = 0; n < kPeers; ++n) {
    Joining& peer = *peers[n];
    const auto joined = peer.engine.await(Kind::connect, peer.connecting);
    REQUIRE_MESSAGE(joined.code == Errc::ok, joined.text);
    for (std::size_t r = 0; r < kRegions; ++r) {
      const auto source = good(peer.engine->register_memory(peer.memory.data() + r * kPage, kPage));
      peer.writes.push_back(
          good(peer.engine->write(joined.peer, source, destinations[r],
                                  {.destination_offset = n * kPage, .length = kPage},
                                  {.timeout = kDeadline}))
              .id);
    }
  }
  CHECK(hosts.reader->stats().peers == kPeers + 1);
  for (const auto& peer : peers) {
    for (const OperationId write : peer->writes) {
      const auto done = peer->engine.await(Kind::write, write);
      CHECK_MESSAGE(done.code == Errc::ok, done.text);
    }
  }
  CHECK(simulated_verbs().commands_of_pollers() == commands);
  peers.clear();
  load.request_stop();
  load.join();
  CHECK(transfers > 0);
  for (std::size_t at = 0; at < received.size(); ++at) {
    const std::size_t peer = at / kPage % kPeers;
    if (received[at] == static_cast<std::byte>(peer + 1)) continue;
    FAIL("byte " << at % kPage << " of peer " << peer << " is wrong");
  }
  MESSAGE("longest step of the engine thread: " << probe->longest_ns() / 1000 << " us, beside "
                                                << transfers << " transfers");
}

TEST_CASE("a scatter reaches 64 peers, each over its queue pair") {
  constexpr std::size_t kPeers = 64;
  constexpr std::size_t kRounds = 200;
  const auto driven = [] {
    EngineOptions options = options_on(1, {});
    options.thread = false;
    return options;
  };
  TestEngine sender(driven());
  std::vector<std::unique_ptr<TestEngine>> engines;
  const auto poll_all = [&] {
    sender->poll();
    for (const auto& engine : engines) (*engine)->poll();
  };
  sender.meanwhile = poll_all;
  std::vector<PeerId> ids;
  std::vector<RegionPtr> regions;
  std::vector<ScatterPart> parts;
  Imm imm = 0;
  for (std::size_t n = 0; n < kPeers; ++n) {
    TestEngine& engine = *engines.emplace_back(std::make_unique<TestEngine>(driven()));
    ids.push_back(sender.connect_to(engine));
    regions.push_back(good(engine->allocate(kPage)));
    imm = good(engine->allocate_counter());  // equal for all, as each is the first of its engine
    parts.push_back({.member = n,
                     .destination = regions.back()->descriptor(),
                     .write = {.source_offset = n * kPage, .length = kPage}});
  }
  const auto source = good(sender->allocate(kPeers * kPage));
  Random random;
  random.fill(source->host(), source->size());
  const auto group = good(sender->peer_group(ids));
  std::vector<std::uint64_t> took_ns;
  for (std::size_t round = 0; round < kRounds; ++round) {
    const std::uint64_t held_up = SimulatedVerbs::held_up_ns();
    const std::uint64_t begin = now_ns();
    const auto scattered = good(sender->scatter(source, group, parts, {.imm = imm}));
    took_ns.push_back(now_ns() - begin - (SimulatedVerbs::held_up_ns() - held_up));
    const auto done = sender.await(Kind::write, scattered.id);
    REQUIRE_MESSAGE(done.code == Errc::ok, done.text);
  }
  for (std::size_t n = 0; n < kPeers; ++n) {
    CHECK((*engines[n])->counter_value(imm) == kRounds);
    CHECK(std::memcmp(regions[n]->host(), source->host() + n * kPage, kPage) == 0);
  }
  std::sort(took_ns.begin() + 1, took_ns.end());  // the first scatter asks for the regions' keys
  MESSAGE("a scatter to 64 peers was posted in " << took_ns[kRounds / 2] / 1000 << " us");
}

TEST_CASE("several queue pairs join two NICs if paths_per_nic_pair says so") {
  EngineOptions ours = options_on(1, {});
  EngineOptions theirs = options_on(1, {});
  ours.tuning.paths_per_nic_pair = 4;
  const std::size_t before = simulated_verbs().queue_pairs();
  Hosts hosts(ours, theirs);
  hosts.transfer();
  CHECK(simulated_verbs().queue_pairs() == before + 2 * 4);
}

namespace {

verbs::Port port_of(const SimulatedDevice& device) {
  simulated_verbs().add(device);
  const auto library = simulated_verbs().library();
  ibv_device** const list = library->get_device_list(nullptr);
  ibv_device** found = list;
  while (device.name != (*found)->name) ++found;
  const auto opened = good(verbs::VerbsDevice::open(library, *found, {.name = device.name}));
  library->free_device_list(list);
  return good(opened->query_port());
}

}  // namespace

TEST_CASE("a port's speed is known by each code of the specification") {
  struct Rate {
    std::uint32_t speed;
    std::uint8_t width;
    std::uint64_t megabits;
  };
  unsigned number = 0;
  for (const auto& [speed, width, megabits] :
       {Rate{1, 2, 10'000}, Rate{2, 2, 20'000}, Rate{4, 2, 40'000}, Rate{8, 2, 40'000},
        Rate{16, 2, 56'000}, Rate{32, 2, 100'000}, Rate{64, 2, 200'000}, Rate{128, 2, 400'000},
        Rate{256, 2, 800'000}, Rate{256, 1, 200'000}, Rate{128, 16, 200'000}, Rate{128, 4, 800'000},
        Rate{32, 8, 300'000}, Rate{512, 2, 10'000}}) {
    CAPTURE(speed);
    const verbs::Port port =
        port_of({.name = "speed" + std::to_string(number++), .width = width, .speed = speed});
    CHECK(port.bits_per_second == megabits * 1'000'000);
  }
}

TEST_CASE("the double reports a speed above NDR only to callers that have room for it") {
  simulated_verbs().add({.name = "xdr", .speed = 256});
  const auto library = simulated_verbs().library();
  ibv_device** const list = library->get_device_list(nullptr);
  ibv_device** found = list;
  while (std::string("xdr") != (*found)->name) ++found;
  ibv_context* const context = library->open_device(*found);
  library->free_device_list(list);
  verbs::PortAttributes all{};
  REQUIRE(library->query_port(context, 1, all) == 0);
  CHECK(all.speed() == 256);
  CHECK(all.known.active_speed == 128);
  verbs::PortAttributes fewer{};
  constexpr std::size_t kOlder = 52;  // without active_speed_ex
  REQUIRE(verbs_get_ctx_op(context, query_port)->query_port(context, 1, &fewer.known, kOlder) == 0);
  CHECK(fewer.speed() == 128);
  library->close_device(context);
}

TEST_CASE("the double's senders wait for the time of the specification's code") {
  const auto ms = [](std::uint8_t code) {
    return static_cast<double>(mlx5::receiver_not_ready_ns(code)) / 1e6;
  };
  CHECK(ms(0) == 655.36);
  CHECK(ms(1) == 0.01);
  CHECK(ms(17) == 3.84);
  CHECK(ms(18) == 5.12);
  CHECK(ms(31) == 491.52);
}

TEST_SUITE_END();
