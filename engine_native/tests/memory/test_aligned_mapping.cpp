// Mappings at a huge page's boundary, also with kernel pages of 64 KiB.
#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

#include "aligned_mapping.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

// Simulates a kernel with pages of 64 KiB (man mmap, munmap): it maps whole pages, and refuses an
// address that is not a page's.
constexpr std::size_t kLargePage = 64u << 10;
constexpr std::uintptr_t kHugePage = 2u << 20;

std::size_t mapped = 0;  // bytes
bool refuses_files = false;

std::size_t whole_pages(std::size_t bytes) {
  return (bytes + kLargePage - 1) / kLargePage * kLargePage;
}

bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kLargePage == 0;
}

void* large_mmap(void* address, std::size_t bytes, int protection, int flags, int fd,
                 off_t offset) noexcept {
  if ((flags & MAP_FIXED) != 0) {
    errno = is_aligned(address) && !refuses_files ? 0 : EINVAL;
    return errno == 0 ? ::mmap(address, bytes, protection, flags, fd, offset) : MAP_FAILED;
  }
  const std::size_t whole = whole_pages(bytes);
  auto* const space =
      static_cast<std::byte*>(::mmap(address, whole + kLargePage, protection, flags, fd, offset));
  if (space == MAP_FAILED) return space;
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(space) % kLargePage;
  if (before > 0) ::munmap(space, before);
  if (before < kLargePage) ::munmap(space + before + whole, kLargePage - before);
  mapped += whole;
  return space + before;
}

int large_munmap(void* address, std::size_t bytes) noexcept {
  if (!is_aligned(address) || bytes == 0) {
    errno = EINVAL;
    return -1;
  }
  mapped -= whole_pages(bytes);
  return ::munmap(address, whole_pages(bytes));
}

constexpr Kernel kLargePages{.page = kLargePage, .mmap = large_mmap, .munmap = large_munmap};

UniqueFd file_of(std::size_t bytes) {
  UniqueFd file(::memfd_create("mapped", MFD_CLOEXEC));
  REQUIRE(::ftruncate(file.get(), static_cast<off_t>(bytes)) == 0);
  return file;
}

}  // namespace

TEST_CASE("a mapping leaves nothing behind if pages are of 64 KiB") {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, kLargePage, kLargePage + 4096,
                                  std::size_t{kHugePage}, std::size_t{kHugePage} + 8192}) {
    CAPTURE(bytes);
    const UniqueFd file = file_of(bytes);
    mapped = 0;
    std::byte* const data = map_aligned(file.get(), bytes, PROT_READ | PROT_WRITE, kLargePages);
    REQUIRE(data != nullptr);
    CHECK(reinterpret_cast<std::uintptr_t>(data) % kHugePage == 0);
    data[bytes - 1] = std::byte{1};
    CHECK(mapped == whole_pages(bytes));
    CHECK(large_munmap(data, bytes) == 0);
    CHECK(mapped == 0);
  }
}

TEST_CASE("a mapping that fails leaves nothing behind") {
  const UniqueFd file = file_of(4096);
  mapped = 0;
  refuses_files = true;
  CHECK(map_aligned(file.get(), 4096, PROT_READ, kLargePages) == nullptr);
  refuses_files = false;
  CHECK(errno == EINVAL);
  CHECK(mapped == 0);
}

TEST_CASE("a kernel of large pages refuses addresses between them") {
  void* const space = large_mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(is_aligned(space));
  CHECK(large_munmap(static_cast<std::byte*>(space) + 4096, 4096) == -1);
  CHECK(errno == EINVAL);
  CHECK(large_munmap(space, 4096) == 0);
}
