#include <doctest/doctest.h>

#include <set>
#include <string>

#include "fabric/nic/nic_pairing.hpp"

using namespace kvxfer;

namespace {

std::vector<NicInfo> nics(const std::vector<std::string>& networks) {
  std::vector<NicInfo> infos;
  for (const std::string& network : networks) infos.push_back({.network = network});
  return infos;
}

std::vector<NicInfo> nics(std::size_t count) {
  return nics(std::vector<std::string>(count, "roce"));
}

}  // namespace

TEST_CASE("every NIC of both sides gets a path, whatever their numbers") {
  for (std::size_t ours = 1; ours <= 8; ++ours) {
    for (std::size_t theirs = 1; theirs <= 8; ++theirs) {
      const auto pairs = pair_nics(nics(ours), ~NicMask{0}, nics(theirs), ~NicMask{0});
      CHECK(pairs.size() == std::max(ours, theirs));
      std::set<std::uint32_t> here;
      std::set<std::uint32_t> there;
      for (const NicPair& pair : pairs) {
        here.insert(pair.ours);
        there.insert(pair.theirs);
      }
      CHECK(here.size() == ours);
      CHECK(there.size() == theirs);
    }
  }
}

TEST_CASE("NICs that are down are left out of the pairs") {
  const auto pairs = pair_nics(nics(2), 0b10, nics(2), 0b01);
  CHECK(pairs == std::vector<NicPair>{{1, 0}});
  CHECK(pair_nics(nics(2), 0, nics(2), 0b11).empty());
}

TEST_CASE("NICs of the same name are paired, whichever others are down") {
  const std::vector<NicInfo> ours{{.name = "mlx5_0", .network = "roce"},
                                  {.name = "mlx5_1", .network = "roce"},
                                  {.name = "mlx5_2", .network = "roce"}};
  const std::vector<NicInfo> theirs{{.name = "mlx5_2", .network = "roce"},
                                    {.name = "mlx5_5", .network = "roce"},
                                    {.name = "mlx5_1", .network = "roce"}};
  using Pairs = std::vector<NicPair>;
  CHECK(pair_nics(ours, 0b111, theirs, 0b111) == Pairs{{1, 2}, {2, 0}, {0, 1}});
  CHECK(pair_nics(ours, 0b011, theirs, 0b111) == Pairs{{1, 2}, {0, 1}});
  CHECK(pair_nics(ours, 0b110, theirs, 0b010) == Pairs{{1, 1}, {2, 1}});
}

TEST_CASE("NICs are paired within their network only") {
  const auto ours = nics({"roce", "infiniband", "roce"});
  const auto theirs = nics({"infiniband", "ofi-efa"});
  CHECK(pair_nics(ours, 0b111, theirs, 0b11) == std::vector<NicPair>{{1, 0}});
  CHECK(pair_nics(nics({"roce"}), 1, nics({"ofi-efa"}), 1).empty());
}
