// The NICs of an engine, and the distribution of writes over several, on the simulated network,
// which counts writes.
#include <cstring>
#include <iterator>
#include <thread>

#include "doubles/simulated_nic.hpp"
#include "support.hpp"

using namespace kvxfer;
using namespace kvxfer::test;
using Kind = Completion::Kind;

namespace {

EngineOptions with_nics(const std::string& name,
                        std::vector<std::pair<std::string, std::uint64_t>> nics) {
  static unsigned engines = 0;
  const std::string prefix = name + std::to_string(++engines) + "/";
  for (auto& nic : nics) nic.first = prefix + nic.first;
  EngineOptions options = options_for("tcp", name);
  options.tcp = false;
  options.more_nics = simulated_network().nics(std::move(nics));
  return options;
}

std::uint64_t delivered(TestEngine& engine, std::size_t nic) {
  return simulated_network().delivered(engine->nics()[nic].name);
}

// The NICs of several factories.
class AllNics final : public NicFactory {
 public:
  explicit AllNics(std::vector<std::shared_ptr<NicFactory>> of) : of_(std::move(of)) {}
  Result<OpenedNics> open(const NicContext& context) override {
    OpenedNics all;
    for (const auto& each : of_) {
      NicContext next = context;
      next.first_number += static_cast<std::uint32_t>(all.nics.size());
      OpenedNics opened = good(each->open(next));
      std::move(opened.nics.begin(), opened.nics.end(), std::back_inserter(all.nics));
    }
    return all;
  }

 private:
  std::vector<std::shared_ptr<NicFactory>> of_;
};

struct NicPairOfEngines {
  NicPairOfEngines(EngineOptions a, EngineOptions b)
      : writer(std::move(a)), reader(std::move(b)), to_reader(writer.connect_to(reader)) {
    source = good(writer->allocate(16u << 20));
    destination = good(reader->allocate(16u << 20));
  }
  Completion write(std::uint64_t length, const WriteOptions& options = {}) {
    const auto submitted = good(
        writer->write(to_reader, source, destination->descriptor(), {.length = length}, options));
    return writer.await(Kind::write, submitted.id);
  }
  TestEngine writer;
  TestEngine reader;
  PeerId to_reader;
  RegionPtr source;
  RegionPtr destination;
};

}  // namespace

TEST_CASE("a single write is distributed over all NICs by bytes") {
  NicPairOfEngines pair(with_nics("a", {{"0", 100}, {"1", 100}, {"2", 100}, {"3", 100}}),
                        with_nics("b", {{"0", 100}, {"1", 100}, {"2", 100}, {"3", 100}}));
  const auto submitted = good(pair.writer->write(
      pair.to_reader, pair.source, pair.destination->descriptor(), {.length = 1u << 20}));
  CHECK(submitted.writes == 4);
  CHECK(pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
  for (std::size_t nic = 0; nic < 4; ++nic) CHECK(delivered(pair.writer, nic) == 1);
  // A write that is too small to be distributed.
  CHECK(good(pair.writer->write(pair.to_reader, pair.source, pair.destination->descriptor(),
                                {.length = 4096}))
            .writes == 1);
}

TEST_CASE("pages are distributed by count, weighted by link speed") {
  auto ours = with_nics("a", {{"fast", 300}, {"slow", 100}});
  ours.tuning.path_timeout = kDeadline;  // nothing is delivered until all is posted
  NicPairOfEngines pair(ours, with_nics("b", {{"fast", 300}, {"slow", 100}}));
  std::vector<std::int64_t> pages;
  for (std::int64_t page = 0; page < 4000; page += 2) pages.push_back(page);
  simulated_network().hold(true);  // so that the posted writes alone decide
  const auto submitted = good(pair.writer->write_pages(
      pair.to_reader, pair.source, pair.destination->descriptor(), same_pages(4096, pages)));
  while (pair.writer->stats().writes_posted < submitted.writes) std::this_thread::yield();
  simulated_network().hold(false);
  CHECK(pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
  const auto fast = static_cast<double>(delivered(pair.writer, 0));
  const auto slow = static_cast<double>(delivered(pair.writer, 1));
  CHECK(fast / slow > 2.8);
  CHECK(fast / slow < 3.2);
}

TEST_CASE("a write that is pinned to a NIC uses no other") {
  NicPairOfEngines pair(with_nics("a", {{"0", 100}, {"1", 100}}), with_nics("b", {{"0", 100}}));
  for (int i = 0; i < 20; ++i) CHECK(pair.write(300000, {.nic = 1}).code == Errc::ok);
  CHECK(delivered(pair.writer, 0) == 0);
  CHECK(delivered(pair.writer, 1) == 20);
  const auto refused = pair.writer->write(
      pair.to_reader, pair.source, pair.destination->descriptor(), {.length = 8}, {.nic = 2});
  REQUIRE(!refused);
  CHECK(refused.error().code == Errc::invalid_argument);
}

TEST_CASE("a pinned write to a peer without NICs is refused") {
  Pair pair("tcp");
  const auto refused = pair.writer->write_imm(pair.to_reader, 1, {.nic = 0});
  REQUIRE(!refused);
  CHECK(refused.error().code == Errc::invalid_argument);
}

TEST_CASE("any mix of 1 to 8 NICs on both sides moves everything") {
  Random random;
  CAPTURE(random.seed);
  for (const auto& [ours, theirs] : {std::pair{1, 8}, {8, 1}, {3, 5}, {8, 8}, {2, 7}}) {
    CAPTURE(ours);
    CAPTURE(theirs);
    const auto list = [](int count) {
      std::vector<std::pair<std::string, std::uint64_t>> nics;
      for (int n = 0; n < count; ++n) nics.emplace_back(std::to_string(n), 100);
      return nics;
    };
    NicPairOfEngines pair(with_nics("a", list(ours)), with_nics("b", list(theirs)));
    random.fill(pair.source->host(), 1u << 20);
    const auto pages = random.distinct_pages(2000, 4096);
    const Imm imm = good(pair.reader->allocate_counter());
    const auto submitted =
        good(pair.writer->write_pages(pair.to_reader, pair.source, pair.destination->descriptor(),
                                      same_pages(256, pages), {.imm = imm}));
    good(pair.reader->expect(imm, submitted.immediates));
    CHECK(pair.reader.await(Kind::counter, imm).code == Errc::ok);
    for (const auto page : pages) {
      const auto at = static_cast<std::size_t>(page) * 256;
      REQUIRE(std::memcmp(pair.source->host() + at, pair.destination->host() + at, 256) == 0);
    }
    for (std::size_t nic = 0; nic < static_cast<std::size_t>(ours); ++nic) {
      CHECK(delivered(pair.writer, nic) > 0);
    }
  }
}

TEST_CASE("an immediate counts for a group only if every common network keeps order") {
  const auto with = [](const std::string& name, std::vector<bool> ordered) {
    auto options = with_nics(name, {{"first", 100}});
    std::vector<std::shared_ptr<NicFactory>> all;
    static unsigned nics = 0;
    for (const bool each : ordered) {
      all.push_back(simulated_network().nics({{name + "/mixed" + std::to_string(++nics), 100}},
                                             {.ordered = each}));
    }
    options.more_nics = std::make_shared<AllNics>(std::move(all));
    return options;
  };
  std::vector<std::int64_t> pages;
  for (std::int64_t page = 0; page < 200; page += 2) pages.push_back(page);
  const auto immediates = [&](const std::vector<bool>& ours, const std::vector<bool>& theirs) {
    NicPairOfEngines pair(with("a", ours), with("b", theirs));
    const auto submitted = good(pair.writer->write_pages(
        pair.to_reader, pair.source, pair.destination->descriptor(), same_pages(64, pages),
        {.imm = good(pair.reader->allocate_counter()), .timeout = kDeadline}));
    CHECK(submitted.writes == 100);
    CHECK(pair.writer.await(Kind::write, submitted.id).code == Errc::ok);
    return submitted.immediates;
  };
  CHECK(immediates({true}, {true}) == 4);
  CHECK(immediates({false}, {false}) == 100);
  CHECK(immediates({true, false}, {true, false}) == 100);
  CHECK(immediates({true, false}, {true}) == 4);  // only the ordered network is common
}

TEST_CASE("if all NICs fail at once, no write fails that they had begun") {
  std::vector<std::pair<std::string, std::uint64_t>> list;
  for (int n = 0; n < 8; ++n) list.emplace_back(std::to_string(n), 100);
  NicPairOfEngines pair(with_nics("a", list), with_nics("b", list));
  const auto write = [&] {
    return good(pair.writer->write(pair.to_reader, pair.source, pair.destination->descriptor(),
                                   {.length = pair.source->size()}, {.timeout = kDeadline}))
        .id;
  };
  CHECK(pair.writer.await(Kind::write, write()).code == Errc::ok);
  simulated_network().hold(true);
  const OperationId id = write();
  (void)pair.writer->stats();  // handled after the write, so that the write is posted
  for (const bool up : {false, true}) {
    for (const auto& nic : pair.writer->nics()) {
      simulated_network().set_link(nic.name, up);
      pair.writer.await(Kind::notice);
    }
  }
  simulated_network().hold(false);
  const auto done = pair.writer.await(Kind::write, id);
  CHECK_MESSAGE(done.code == Errc::ok, done.text);
}

TEST_CASE("a write whose paths fail again and again is given up, and the error says why") {
  NicPairOfEngines pair(with_nics("a", {{"0", 100}}), with_nics("b", {{"0", 100}}));
  const std::string nic = pair.writer->nics()[0].name;
  simulated_network().refuse_writes(nic, 4);
  const auto fifth = pair.write(4096, {.timeout = kDeadline});
  CHECK_MESSAGE(fifth.code == Errc::ok, fifth.text);
  simulated_network().refuse_writes(nic, 100);
  const auto never = pair.write(4096, {.timeout = kDeadline});
  CHECK(never.code == Errc::nic_lost);
  CHECK_MESSAGE(never.text.find("lost 5 times") != std::string::npos, never.text);
  CHECK_MESSAGE(never.text.find("refused a write") != std::string::npos, never.text);
  simulated_network().refuse_writes(nic, 0);
  CHECK(pair.write(4096, {.timeout = kDeadline}).code == Errc::ok);
}

TEST_CASE("the error for a name that no NIC has lists the names of the NICs") {
  auto options = with_nics("a", {{"0", 100}, {"1", 100}});
  const std::string nic = good(TransferEngine::create(options))->nics()[0].name;
  options.nics = {nic, "mlx5_7", "rdmap9s0"};
  const auto refused = TransferEngine::create(options);
  REQUIRE(!refused);
  CHECK(refused.error().code == Errc::fabric_unavailable);
  const std::string& text = refused.error().text;
  CHECK_MESSAGE(text.find("nics names mlx5_7, rdmap9s0, which") != std::string::npos, text);
  CHECK_MESSAGE(text.find("choose from " + nic + ", ") != std::string::npos, text);
  options.nics = {nic};
  CHECK(TransferEngine::create(options));
}

TEST_CASE("one notice names NICs that cannot be used, and the other NICs are used") {
  auto options = options_for("tcp", "a");
  options.tcp = false;
  const auto told = [&](const std::vector<std::string>& broken,
                        const std::vector<std::string>& foreign) {
    options.more_nics =
        simulated_network().nics({{"whole", 100}}, {.broken = broken, .foreign = foreign});
    TestEngine engine(options);
    REQUIRE(engine->nics().size() == 1);
    CHECK(engine->nics()[0].name == "whole");
    const auto completions = engine->drain();
    REQUIRE(completions.size() == 1);
    CHECK(completions[0].kind == Kind::notice);
    return completions[0].text;
  };
  CHECK(told({"broken"}, {"foreign"}) == "NIC broken cannot be opened");
  options.nics = {"whole", "broken"};
  CHECK(told({"broken"}, {"foreign"}) == "NIC broken cannot be opened");
  options.nics = {"whole", "foreign"};
  const std::string text = told({}, {"foreign"});
  CHECK_MESSAGE(text.find("these members of nics: foreign") != std::string::npos, text);
}
