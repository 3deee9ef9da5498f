// Every input that a fuzzer found worth keeping, past findings among them.
#include <filesystem>
#include <fstream>
#include <iterator>

#include "support.hpp"
#include "targets.hpp"

using namespace kvxfer;

namespace {

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TEST_SUITE_BEGIN("fuzz");

TEST_CASE("the corpus of every fuzz target keeps the promises of the code") {
  for (const fuzz::Target& target : fuzz::kTargets) {
    std::size_t inputs = 0;
    target.run({});
    const auto corpus = std::filesystem::path(KVXFER_CORPUS) / target.name;
    for (const auto& entry : std::filesystem::directory_iterator(corpus)) {
      CAPTURE(entry.path().string());
      target.run(content_of(entry.path()));
      ++inputs;
    }
    CHECK_MESSAGE(inputs > 0, target.name);
  }
}

TEST_SUITE_END();
