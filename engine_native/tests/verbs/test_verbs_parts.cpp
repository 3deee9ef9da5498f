// The parts of the verbs fabric that need no device.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <future>
#include <memory>
#include <vector>

#include "fabric/verbs/gid_choice.hpp"
#include "fabric/verbs/path_budget.hpp"
#include "fabric/verbs/path_endpoint.hpp"
#include "fabric/verbs/queue_pair.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using namespace kvxfer::verbs;

namespace {

ibv_gid_entry entry(std::uint32_t index, std::vector<std::uint8_t> first_bytes,
                    std::uint32_t type = IBV_GID_TYPE_ROCE_V2, std::uint32_t interface = 1) {
  ibv_gid_entry made{
      .gid_index = index, .port_num = 1, .gid_type = type, .ndev_ifindex = interface};
  for (std::size_t i = 0; i < first_bytes.size(); ++i) made.gid.raw[i] = first_bytes[i];
  return made;
}

const std::vector<std::uint8_t> kIpv4{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, 3};
const std::vector<std::uint8_t> kIpv6{0x20, 0x01, 0x0d, 0xb8};
const std::vector<std::uint8_t> kLinkLocal{0xfe, 0x80};

}  // namespace

TEST_CASE("a port's routable IPv4 address of this namespace is used") {
  const auto ours = [](const ibv_gid_entry& one) { return one.ndev_ifindex == 1; };
  const auto chosen = [&](const std::vector<ibv_gid_entry>& entries) {
    return choose_gid(entries, IBV_LINK_LAYER_ETHERNET, -1, ours)
        .value_or(ibv_gid_entry{})
        .gid_index;
  };
  constexpr std::uint32_t kV1 = IBV_GID_TYPE_ROCE_V1;
  constexpr std::uint32_t kV2 = IBV_GID_TYPE_ROCE_V2;
  CHECK(chosen({entry(0, kLinkLocal, kV1), entry(1, kLinkLocal), entry(2, kIpv4, kV1),
                entry(3, kIpv4), entry(4, kIpv6)}) == 3);
  CHECK(chosen({entry(1, kLinkLocal), entry(2, kIpv6)}) == 2);
  CHECK(chosen({entry(1, kIpv4, kV1), entry(2, kLinkLocal)}) == 2);
  CHECK(chosen({entry(5, kLinkLocal), entry(6, kLinkLocal)}) == 5);
  // The host's own address, seen in a container that has only the second interface.
  CHECK(chosen({entry(1, kIpv4, kV2, 7), entry(2, kLinkLocal)}) == 2);
  CHECK(chosen({entry(1, kIpv4, kV2, 7)}) == 1);
  CHECK(!choose_gid({}, IBV_LINK_LAYER_ETHERNET, -1, ours));
  const std::vector<ibv_gid_entry> fabric{entry(0, kLinkLocal, 0, 0), entry(1, kIpv4, 0, 0)};
  CHECK(choose_gid(fabric, IBV_LINK_LAYER_INFINIBAND, -1, ours)->gid_index == 0);
}

TEST_CASE("a NIC's queues are divided so that they never overrun") {
  struct Limits {
    std::uint32_t completions;
    std::uint32_t receives;
    std::uint32_t at_least;  // the least number of paths
  };
  for (const auto& [completions, receives, at_least] :
       {Limits{32703, 32703, 64}, Limits{65472, 32703, 100}, Limits{1024, 1024, 8},
        Limits{300, 100, 1}, Limits{64, 64, 0}}) {
    CAPTURE(completions);
    PathBudget budget(completions, receives, deep_enough(400'000'000'000));
    std::vector<PathShare> shares;
    std::uint64_t sends = 0;
    std::uint64_t taken = 0;
    while (const auto share = budget.take()) {
      CHECK(share->sends >= 16);
      CHECK(share->receives >= 64);
      sends += share->sends + 1;
      taken += share->receives;
      shares.push_back(*share);
    }
    CHECK(sends + taken <= completions);
    CHECK(taken <= receives);
    CHECK(shares.size() >= at_least);
    CHECK(budget.paths() == shares.size());
    if (shares.empty()) continue;
    // Another path may have what a path gives back.
    budget.give_back(shares.back());
    const auto again = budget.take();
    REQUIRE(again);
    CHECK(again->sends == shares.back().sends);
    CHECK(again->receives == shares.back().receives);
    CHECK(!budget.take());
  }
}

TEST_CASE("the first paths' sends fill the link") {
  CHECK(deep_enough(10'000'000'000) == 256);
  CHECK(deep_enough(200'000'000'000) == 488);
  CHECK(deep_enough(400'000'000'000) == 976);
  CHECK(deep_enough(800'000'000'000) == 1024);
  CHECK(PathBudget(65472, 32703, 976).take()->sends == 976);
  CHECK(PathBudget(1024, 1024, 976).take()->sends == 32);
}

TEST_CASE("an endpoint survives a round trip, and other text is refused") {
  PathEndpoint endpoint{.queue_pair = 0x123456,
                        .packet_sequence = 0xabcdef,
                        .imm_window = 777,
                        .lid = 12,
                        .mtu = IBV_MTU_4096,
                        .link_layer = IBV_LINK_LAYER_ETHERNET};
  endpoint.gid.raw[3] = 9;
  const std::string bytes = endpoint.encode();
  const auto decoded = PathEndpoint::decode(bytes);
  REQUIRE(decoded);
  CHECK(decoded->encode() == bytes);
  CHECK(decoded->imm_window == 777);
  CHECK(decoded->gid.raw[3] == 9);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    CHECK(!PathEndpoint::decode(bytes.substr(0, size)));
  }
  CHECK(!PathEndpoint::decode(bytes + "x"));
  endpoint.mtu = 0;
  CHECK(!PathEndpoint::decode(endpoint.encode()));
  endpoint.mtu = IBV_MTU_1024;
  endpoint.queue_pair = 1u << 24;
  CHECK(!PathEndpoint::decode(endpoint.encode()));
}

TEST_CASE("packets carry the traffic class and service level, and a route if they need one") {
  PathEndpoint theirs{.lid = 7, .link_layer = IBV_LINK_LAYER_ETHERNET};
  theirs.gid.raw[15] = 9;
  Port port{.link_layer = IBV_LINK_LAYER_ETHERNET, .gid_index = 3};
  const TrafficMarks marks{.traffic_class = 106, .service_level = 3};
  const ibv_ah_attr roce = address_vector(port, theirs, marks);
  CHECK(roce.is_global == 1);
  CHECK(roce.grh.traffic_class == 106);
  CHECK(roce.sl == 3);
  CHECK(roce.grh.sgid_index == 3);
  CHECK(roce.grh.dgid.raw[15] == 9);
  CHECK(roce.port_num == 1);
  port.link_layer = theirs.link_layer = IBV_LINK_LAYER_INFINIBAND;
  const ibv_ah_attr subnet = address_vector(port, theirs, marks);
  CHECK(subnet.is_global == 0);
  CHECK(subnet.dlid == 7);
  CHECK(subnet.sl == 3);
  theirs.gid.raw[0] = 1;  // another subnet
  CHECK(address_vector(port, theirs, marks).is_global == 1);
}

TEST_CASE("a host without RDMA runs, unless verbs are required") {
  if (std::filesystem::exists("/sys/class/infiniband/rxe0")) return;
  auto options = options_for("tcp", "engine");
  options.verbs = FabricUse::if_available;
  TestEngine engine(options);
  CHECK(engine->nics().empty());
  for (const auto& completion : engine->drain()) CHECK(completion.kind != Completion::Kind::notice);
  options.verbs = FabricUse::required;
  const auto refused = TransferEngine::create(options);
  REQUIRE(!refused);
  CHECK(refused.error().code == Errc::fabric_unavailable);
  CHECK(refused.error().text.find("verbs") != std::string::npos);
}
