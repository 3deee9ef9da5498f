#include "conformance.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <mutex>
#include <sstream>

#ifdef KVXFER_HAVE_VERBS
#include "doubles/simulated_verbs.hpp"
#include "fabric/verbs/verbs_factory.hpp"
#endif
#ifdef KVXFER_HAVE_OFI
#include "doubles/simulated_efa.hpp"
#include "fabric/ofi/ofi_factory.hpp"
#endif
#include "doubles/simulated_nic.hpp"

namespace kvxfer::test {
namespace {

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream in(list);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

std::vector<std::string> rdma_devices() {
  std::vector<std::string> devices;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/class/infiniband", none)) {
    devices.push_back(entry.path().filename());
  }
  std::sort(devices.begin(), devices.end());
  return devices;
}

// The cells of the table, filled by the listener below.
class Table {
 public:
  enum class Cell : std::uint8_t { passed, failed };

  void begin_case(const char* name) { case_ = name; }
  void begin_cell(const std::string& fabric) {
    if (rows_.empty() || rows_.back().first != case_) rows_.emplace_back(case_, Row{});
    rows_.back().second[fabric] = Cell::passed;
    fabric_ = fabric;
  }
  void end_cell() { fabric_.clear(); }
  void fail() {
    if (!fabric_.empty()) rows_.back().second[fabric_] = Cell::failed;
  }
  void print() const {
    if (rows_.empty()) return;
    std::printf("\nconformance (%u NICs per engine where there are NICs)\n", nics_per_engine());
    std::vector<std::string> shown;
    for (const std::string& fabric : all_fabrics()) {
      if (const std::string why = why_not(fabric); why.empty()) {
        shown.push_back(fabric);
        std::printf("  %-10s", fabric.c_str());
      }
    }
    std::printf("\n");
    for (const auto& [name, row] : rows_) {
      for (const std::string& fabric : shown) {
        const auto cell = row.find(fabric);
        const char* text = cell == row.end() ? "" : cell->second == Cell::passed ? "ok" : "FAILED";
        std::printf("  %-10s", text);
      }
      std::printf("  %s\n", name.c_str());
    }
    for (const std::string& fabric : all_fabrics()) {
      if (const std::string why = why_not(fabric); !why.empty()) {
        std::printf("  not run: %s: %s\n", fabric.c_str(), why.c_str());
      }
    }
  }

 private:
  using Row = std::map<std::string, Cell>;
  std::vector<std::pair<std::string, Row>> rows_;
  std::string case_;
  std::string fabric_;
};

Table& table() {
  static Table instance;
  return instance;
}

struct Listener : doctest::IReporter {
  explicit Listener(const doctest::ContextOptions&) {}
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override { table().print(); }
  void test_case_start(const doctest::TestCaseData& data) override {
    table().begin_case(data.m_name);
  }
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override { table().end_cell(); }
  void test_case_exception(const doctest::TestCaseException&) override { table().fail(); }
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData& data) override {
    if (data.m_failed) table().fail();
  }
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};
DOCTEST_REGISTER_LISTENER("conformance", 1, Listener);

}  // namespace

const std::vector<std::string>& all_fabrics() {
  static const std::vector<std::string> fabrics{"tcp",   "local", "simulated", "ordered",
#ifdef KVXFER_HAVE_VERBS
                                                "mlx5",
#endif
#ifdef KVXFER_HAVE_OFI
                                                "efa",
#endif
                                                "verbs", "ofi",   "ofi-strict"};
  return fabrics;
}

std::string why_not(const std::string& fabric) {
  if (const char* asked = std::getenv("KVXFER_TEST_FABRICS")) {
    const auto wanted = split(asked);
    const bool is = std::find(wanted.begin(), wanted.end(), fabric) != wanted.end();
    return is ? "" : "KVXFER_TEST_FABRICS leaves it out";
  }
  if (fabric == "verbs" && rdma_devices().empty()) return "no RDMA device; see make help";
  if (fabric.starts_with("ofi") && !std::getenv("KVXFER_LIBFABRIC")) {
    return "no libfabric; scripts/test sets KVXFER_LIBFABRIC";
  }
  return "";
}

bool places_by_nic(const std::string& fabric) { return fabric != "tcp" && fabric != "local"; }

unsigned nics_per_engine() {
  const char* asked = std::getenv("KVXFER_TEST_NICS");
  return asked ? static_cast<unsigned>(std::strtoul(asked, nullptr, 10)) : 2;
}

std::vector<std::string> held_fabrics() {
  std::vector<std::string> held;
  std::copy_if(all_fabrics().begin(), all_fabrics().end(), std::back_inserter(held),
               [](const std::string& fabric) {
                 const bool holds = fabric == "simulated" || fabric == "ordered" ||
                                    fabric == "mlx5" || fabric == "efa";
                 return holds && why_not(fabric).empty();
               });
  return held;
}

void hold_nics(const std::string& fabric, const std::vector<NicInfo>& nics, bool held) {
  if (fabric == "simulated" || fabric == "ordered") return simulated_network().hold(held);
#ifdef KVXFER_HAVE_VERBS
  for (const NicInfo& nic : nics) {
    if (fabric == "mlx5") simulated_verbs().cut(nic.name, held);
  }
#endif
#ifdef KVXFER_HAVE_OFI
  if (fabric == "efa") simulated_efa().hold(held);
#endif
}

EngineOptions options_for(const std::string& fabric, const std::string& name) {
  EngineOptions options;
  options.cluster_key = "a key for the tests only";
  options.name = name;
  // On a busy machine, or with software RDMA under emulation, an engine's thread may have no core.
  options.peer_timeout = options.tuning.path_timeout = std::chrono::seconds(20);
  options.local = fabric == "local";
  options.tcp = fabric == "tcp";
  const unsigned nics = nics_per_engine();
  if (fabric == "simulated" || fabric == "ordered") {
    static std::atomic<unsigned> engines = 0;
    const std::string prefix = "engine" + std::to_string(++engines) + "/nic";
    std::vector<std::pair<std::string, std::uint64_t>> own;
    for (unsigned n = 0; n < nics; ++n) own.emplace_back(prefix + std::to_string(n), 100);
    options.more_nics = simulated_network().nics(std::move(own), {.ordered = fabric == "ordered"});
  } else if (fabric == "verbs") {
    options.verbs = FabricUse::required;
    options.nics = rdma_devices();
    if (options.nics.size() > nics) options.nics.resize(nics);
#ifdef KVXFER_HAVE_VERBS
  } else if (fabric == "mlx5") {
    static std::atomic<unsigned> engines = 0;
    const std::string prefix = "mlx5_" + std::to_string(++engines) + "_";
    for (unsigned n = 0; n < nics; ++n) {
      options.nics.push_back(prefix + std::to_string(n));
      simulated_verbs().add({.name = options.nics.back()});
    }
    options.more_nics = std::make_shared<verbs::VerbsFactory>(simulated_verbs().library());
#endif
#ifdef KVXFER_HAVE_OFI
  } else if (fabric == "efa") {
    static std::atomic<unsigned> engines = 0;
    const std::string prefix = "rdmap" + std::to_string(++engines) + "s";
    for (unsigned n = 0; n < nics; ++n) {
      options.nics.push_back(prefix + std::to_string(n));
      simulated_efa().add({.name = options.nics.back()});
    }
    options.more_nics = std::make_shared<ofi::OfiFactory>(ofi::OfiFactory::Overrides{
        .use = FabricUse::required, .library = simulated_efa().library()});
#endif
  } else if (fabric.starts_with("ofi")) {
    options.ofi = FabricUse::required;
    options.ofi_provider = "tcp";
    options.tuning.ofi_endpoints = nics;
    options.ofi_strict = fabric != "ofi";
  }
  return options;
}

EachFabric::EachFabric() {
  const auto& all = all_fabrics();
  std::copy_if(all.begin(), all.end(), std::back_inserter(fabrics_),
               [](const std::string& fabric) { return why_not(fabric).empty(); });
}

const std::string& EachFabric::Iterator::operator*() const {
  table().begin_cell(fabrics_[at_]);
  return fabrics_[at_];
}

EachFabric::Iterator& EachFabric::Iterator::operator++() {
  table().end_cell();
  ++at_;
  return *this;
}

}  // namespace kvxfer::test
