#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstring>

#include "fabric/local/ring.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {
bool before_linux_5_1 = false;
}

// Replaces libc's call: a kernel that does not know one of the seals adds none of them.
extern "C" int fcntl(int fd, int command, ...) {
  std::va_list arguments;
  va_start(arguments, command);
  const auto argument = va_arg(arguments, std::uintptr_t);
  va_end(arguments);
  if (before_linux_5_1 && command == F_ADD_SEALS && (argument & F_SEAL_FUTURE_WRITE)) {
    errno = EINVAL;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fcntl, fd, command, argument));
}

TEST_CASE("memory that a peer could write to is not shared") {
  const auto sealed = good(MemoryRegion::allocate({}, 4096));
  CHECK(sealed->shareable());
  CHECK(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, sealed->memfd(), 0) ==
        MAP_FAILED);
  before_linux_5_1 = true;
  const auto unsealed = good(MemoryRegion::allocate({}, 4096));
  before_linux_5_1 = false;
  CHECK(!unsealed->shareable());
  std::memset(unsealed->host(), 7, 4096);
}

TEST_CASE("allocated memory is zeroed, huge-page aligned and cannot shrink under a peer") {
  const auto region = good(MemoryRegion::allocate({}, 3u << 20));
  CHECK(reinterpret_cast<std::uintptr_t>(region->host()) % (2u << 20) == 0);
  for (std::size_t i = 0; i < region->size(); i += 4096) CHECK(region->host()[i] == std::byte{0});
  CHECK(local::sealed_against_shrinking(region->memfd()));
  CHECK(::ftruncate(region->memfd(), 0) != 0);
}

TEST_CASE("a region in shared memory is shareable, and keeps the memory alive") {
  constexpr std::size_t kSize = 3u << 20;
  auto shared = good(allocate_shared(kSize));
  std::byte* const start = bytes_of(shared).data();
  const auto shareable = [](std::byte* address, std::size_t bytes) {
    return good(MemoryRegion::wrap({}, address, bytes))->shareable();
  };
  CHECK(shareable(start, kSize));
  CHECK(shareable(start + kSize - 1, 1));
  CHECK_FALSE(shareable(start, kSize + 1));
  CHECK_FALSE(shareable(start - 1, 2));
  const auto part = good(MemoryRegion::wrap({}, start + 12345, 4096));
  CHECK(part->memfd_offset() == 12345);
  start[12345] = std::byte{1};
  shared.reset();
  CHECK(part->host()[0] == std::byte{1});
  CHECK(shareable(start, kSize));
}

TEST_CASE("keys differ between regions and are not derived from each other") {
  const auto a = good(MemoryRegion::allocate({}, 1));
  const auto b = good(MemoryRegion::allocate({}, 1));
  CHECK(a->key() != b->key());
  CHECK(a->key() + 1 != b->key());
}

TEST_CASE("invalid memory is refused") {
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

TEST_CASE("region descriptors survive a round trip, and garbage is refused") {
  MrDescriptor descriptor{.key = 7, .length = 11, .imm = 9};
  descriptor.engine.bytes.fill(3);
  const std::string bytes = descriptor.encode();
  const auto decoded = good(MrDescriptor::decode(bytes));
  CHECK(decoded.key == 7);
  CHECK(decoded.imm == 9);
  CHECK(decoded.length == 11);
  CHECK(decoded.engine == descriptor.engine);
  // Older engines have an address in the place of the immediate of a grant.
  std::string older = bytes;
  const std::uint64_t address = 0x7f00'0000'1009;
  std::memcpy(older.data() + 28, &address, sizeof address);
  CHECK(good(MrDescriptor::decode(older)).imm == 0);
  CHECK(!MrDescriptor::decode(bytes.substr(1)));
  CHECK(!MrDescriptor::decode(std::string(bytes.size(), 'x')));
}
