// The NIC that moves nothing: it reports every write and counts every immediate.
#include <cstring>

#include "fabric/null/null_domain.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

EngineOptions null_options(const std::string& name, const std::shared_ptr<NicFactory>& nics) {
  auto options = options_for("tcp", name);
  options.tcp = false;
  options.more_nics = nics;
  return options;
}

}  // namespace

TEST_CASE("null: writes are reported and immediates counted, but nothing is moved") {
  const auto nics = std::make_shared<null::NullFactory>(true);
  TestEngine writer(null_options("writer", nics));
  TestEngine reader(null_options("reader", nics));
  const PeerId to_reader = writer.connect_to(reader);
  CHECK(writer.await(Kind::peer_up).fabric == "null");
  const auto source = good(writer->allocate(2 * kPage * kPages));
  const auto destination = good(reader->allocate(2 * kPage * kPages));
  std::memset(source->host(), 1, source->size());
  std::vector<std::int64_t> pages(kPages);
  for (std::size_t i = 0; i < kPages; ++i) pages[i] = static_cast<std::int64_t>(2 * i);
  const Imm imm = good(reader->allocate_counter());
  std::uint64_t total = 0;
  for (int round = 0; round < 20; ++round) {
    const auto submitted =
        good(writer->write_pages(to_reader, source, destination->descriptor(),
                                 same_pages(kPage, pages), {.imm = imm, .timeout = kDeadline}));
    CHECK(submitted.writes == kPages);
    CHECK(submitted.immediates == kPages / 32);
    total += submitted.immediates;
    CHECK(writer.await(Kind::write, submitted.id).code == Errc::ok);
  }
  good(reader->expect(imm, total));
  CHECK(reader.await(Kind::counter, imm).code == Errc::ok);
  CHECK(destination->host()[0] == std::byte{0});

  writer->disconnect(to_reader);
  CHECK(reader.await(Kind::peer_down).code == Errc::peer_lost);
  const PeerId again = writer.connect_to(reader);
  const auto told = good(writer->write_imm(again, imm, {.timeout = kDeadline}));
  CHECK(writer.await(Kind::write, told.id).code == Errc::ok);
}

TEST_CASE("null: engines of two networks do not connect") {
  TestEngine writer(null_options("writer", std::make_shared<null::NullFactory>(true)));
  TestEngine reader(null_options("reader", std::make_shared<null::NullFactory>(true)));
  const OperationId id = writer->connect(reader->address(), std::chrono::seconds(1));
  const auto refused = writer.await(Kind::connect, id);
  CHECK(refused.code == Errc::connect_failed);
  CHECK_MESSAGE(refused.text.find("network of null NICs") != std::string::npos, refused.text);
}
