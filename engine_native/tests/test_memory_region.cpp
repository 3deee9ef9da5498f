#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "fabric/local/ring.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

TEST_CASE("allocated memory is zeroed, huge-page aligned and cannot shrink under a peer") {
  const auto region = good(MemoryRegion::allocate({}, 3u << 20));
  CHECK(reinterpret_cast<std::uintptr_t>(region->data()) % (2u << 20) == 0);
  for (std::size_t i = 0; i < region->size(); i += 4096) CHECK(region->data()[i] == std::byte{0});
  CHECK(local::sealed_against_shrinking(region->memfd()));
  CHECK(::ftruncate(region->memfd(), 0) != 0);
}

TEST_CASE("keys differ between regions and are not derived from each other") {
  const auto a = good(MemoryRegion::allocate({}, 1));
  const auto b = good(MemoryRegion::allocate({}, 1));
  CHECK(a->key() != b->key());
  CHECK(a->key() + 1 != b->key());
}

TEST_CASE("memory that cannot be meant is refused") {
  std::byte byte{};
  CHECK(MemoryRegion::wrap({}, nullptr, 8).error().code == Errc::invalid_argument);
  CHECK(MemoryRegion::wrap({}, &byte, 0).error().code == Errc::invalid_argument);
  CHECK(MemoryRegion::wrap({}, &byte, SIZE_MAX).error().code == Errc::invalid_argument);
  CHECK(MemoryRegion::allocate({}, 0).error().code == Errc::invalid_argument);
  CHECK(MemoryRegion::allocate({}, SIZE_MAX).error().code == Errc::invalid_argument);
}

TEST_CASE("a ring that its creator could shrink is not mapped") {
  UniqueFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(unsealed.get(), sizeof(local::RingMemory)) == 0);
  CHECK(!local::SharedRing::map(std::move(unsealed)));
}
