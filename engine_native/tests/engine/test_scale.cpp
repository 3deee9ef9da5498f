// Large numbers on every fabric: immediates, peers, bytes in one region; and peers that are
// restarted.
#include <sys/mman.h>

#include <cstring>

#include "fd.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

TEST_SUITE_BEGIN("conformance");

namespace {

// Enough for a million immediates on a busy machine.
constexpr Duration kLong = std::chrono::minutes(20);

// A NIC in software handles thousands of immediates a second, not millions.
std::size_t immediates_for(const std::string& fabric) {
  const char* full = std::getenv("KVXFER_TEST_FULL");
  const bool slow = fabric == "verbs" || fabric.starts_with("ofi");
  return slow && !full ? 100'000 : 1'000'000;
}

// A region larger than its memory: the same 2 MiB over and over.
class AliasedMemory {
 public:
  explicit AliasedMemory(std::size_t bytes) : bytes_(bytes) {
    memfd_ = UniqueFd(::memfd_create("aliased", MFD_CLOEXEC));
    REQUIRE(::ftruncate(memfd_.get(), kPiece) == 0);
    data_ = static_cast<std::byte*>(
        ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    REQUIRE(data_ != MAP_FAILED);
    for (std::size_t at = 0; at < bytes; at += kPiece) {
      REQUIRE(::mmap(data_ + at, kPiece, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                     memfd_.get(), 0) != MAP_FAILED);
    }
  }
  ~AliasedMemory() { ::munmap(data_, bytes_); }
  AliasedMemory(const AliasedMemory&) = delete;
  AliasedMemory& operator=(const AliasedMemory&) = delete;
  std::byte* data() const { return data_; }

  static constexpr std::size_t kPiece = 2u << 20;

 private:
  std::size_t bytes_;
  UniqueFd memfd_;
  std::byte* data_ = nullptr;
};

}  // namespace

TEST_CASE("a million immediates are counted, none lost, none twice") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const auto source = good(pair.writer->allocate(1u << 20));
    const auto destination = good(pair.reader->allocate(1u << 20));
    // Every second 8 bytes: no two pages are neighbours, so each is a separate write.
    std::vector<std::int64_t> pages(immediates_for(fabric));
    for (std::size_t i = 0; i < pages.size(); ++i) {
      pages[i] = static_cast<std::int64_t>(i * 2 % (1u << 17));
    }
    const Imm imm = good(pair.reader->allocate_counter());
    const auto submitted =
        good(pair.writer->write_pages(pair.to_reader, source, destination->descriptor(),
                                      same_pages(8, pages), {.imm = imm, .timeout = kLong}));
    CHECK(submitted.writes == pages.size());
    good(pair.reader->expect(imm, submitted.immediates));
    const auto done = pair.writer.await(Kind::write, submitted.id, kLong);
    CHECK_MESSAGE(done.code == Errc::ok, done.text);
    // On a busy machine most of them may still be on the way to the reader.
    CHECK(pair.reader.await(Kind::counter, imm, kLong).code == Errc::ok);
    CHECK(pair.reader->counter_value(imm) == submitted.immediates);
  }
}

TEST_CASE("64 peers write to one reader at once") {
  constexpr std::size_t kPeers = 64;
  constexpr std::size_t kPart = 64u << 10;
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    auto with_one_nic = [&](const std::string& name) {
      auto options = options_for(fabric, name);
      options.tuning.lanes = 1;
      return options;
    };
    TestEngine reader(with_one_nic("reader"));
    const auto destination = good(reader->allocate(kPeers * kPart));
    const Imm imm = good(reader->allocate_counter());
    std::vector<std::unique_ptr<TestEngine>> writers;
    std::vector<OperationId> operations;
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < kPeers; ++i) {
      auto& writer = *writers.emplace_back(
          std::make_unique<TestEngine>(with_one_nic("writer" + std::to_string(i))));
      const auto source = good(writer->allocate(kPart));
      std::memset(source->host(), static_cast<int>(i + 1), kPart);
      const PeerId peer = writer.connect_to(reader);
      const auto submitted = good(writer->write(peer, source, destination->descriptor(),
                                                {.destination_offset = i * kPart, .length = kPart},
                                                {.imm = imm, .timeout = kDeadline}));
      operations.push_back(submitted.id);
      total += submitted.immediates;
    }
    good(reader->expect(imm, total));
    CHECK(reader.await(Kind::counter, imm).code == Errc::ok);
    for (std::size_t i = 0; i < kPeers; ++i) {
      CHECK(writers[i]->await(Kind::write, operations[i]).code == Errc::ok);
      const std::byte expected{static_cast<unsigned char>(i + 1)};
      CHECK(destination->host()[i * kPart] == expected);
      CHECK(destination->host()[(i + 1) * kPart - 1] == expected);
    }
    CHECK(reader->stats().peers == kPeers);
  }
}

TEST_CASE("offsets beyond 4 GiB arrive where they should") {
  constexpr std::size_t kBytes = (std::size_t{4} << 30) + 2 * AliasedMemory::kPiece;
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    Pair pair(fabric);
    const AliasedMemory from(kBytes);
    const AliasedMemory to(kBytes);
    const auto source = good(pair.writer->register_memory(from.data(), kBytes));
    const auto destination = good(pair.reader->register_memory(to.data(), kBytes));
    constexpr std::size_t kPlace = 1u << 20;  // an offset within a piece
    const std::size_t last = kBytes - AliasedMemory::kPiece + kPlace;
    std::memset(from.data() + kPlace, 0x5a, 5000);
    write_and_count(pair.writer, pair.to_reader, pair.reader, source, destination,
                    {.source_offset = last, .destination_offset = last + 77, .length = 5000});
    CHECK(to.data()[last + 76] == std::byte{0});
    CHECK(to.data()[last + 77] == std::byte{0x5a});
    CHECK(to.data()[last + 77 + 4999] == std::byte{0x5a});
    CHECK(to.data()[last + 77 + 5000] == std::byte{0});
    const auto beyond = pair.writer->write(pair.to_reader, source, destination->descriptor(),
                                           {.destination_offset = kBytes - 10, .length = 11});
    REQUIRE(!beyond);
    CHECK(beyond.error().code == Errc::out_of_bounds);
    good(pair.writer->deregister(source));
    good(pair.reader->deregister(destination));
  }
}

TEST_CASE("a restarted peer is a new one, and descriptors of the old one are refused") {
  for (const std::string& fabric : EachFabric()) {
    CAPTURE(fabric);
    TestEngine writer(options_for(fabric, "writer"));
    const auto source = good(writer->allocate(1u << 20));
    std::memset(source->host(), 0x33, source->size());
    std::optional<MrDescriptor> old_region;
    EngineAddress old_address;
    {
      TestEngine reader(options_for(fabric, "reader"));
      old_address = reader->address();
      const PeerId peer = writer.connect_to(reader);
      const auto region = good(reader->allocate(1u << 20));
      old_region = region->descriptor();
      const auto first = good(writer->write(peer, source, *old_region, {.length = 1u << 20}));
      CHECK(writer.await(Kind::write, first.id).code == Errc::ok);
    }
    CHECK(writer.await(Kind::peer_down).code == Errc::peer_lost);
    auto options = options_for(fabric, "reader");
    options.port = old_address.port;
    TestEngine reader(options);
    const auto refused = writer->connect(old_address, kDeadline);
    CHECK(writer.await(Kind::connect, refused).code == Errc::peer_restarted);
    const PeerId peer = writer.connect_to(reader);
    const auto region = good(reader->allocate(1u << 20));
    const auto stale = writer->write(peer, source, *old_region, {.length = 8});
    REQUIRE(!stale);
    CHECK(stale.error().code == Errc::unknown_region);
    write_and_count(writer, peer, reader, source, region, {.length = 1u << 20});
    CHECK(std::memcmp(region->host(), source->host(), 1u << 20) == 0);
  }
}

TEST_SUITE_END();
