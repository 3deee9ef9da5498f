// Every input of the fuzz targets: seeds, and what fuzzing found, including past defects.
#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "support.hpp"
#include "targets.hpp"
#include "world.hpp"

using namespace kvxfer;

namespace {

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Runs a target with every file of a folder; returns the number of files.
std::size_t replay(const fuzz::Target& target, const std::filesystem::path& folder) {
  std::size_t inputs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    CAPTURE(entry.path().string());
    target.run(content_of(entry.path()));
    ++inputs;
  }
  return inputs;
}

// True if this process has loaded the double of a CUDA driver.
bool loads_double() {
#ifdef KVXFER_CUDA_DOUBLE
  return !std::getenv("KVXFER_TEST_CUDA") && ::dlopen(KVXFER_CUDA_DOUBLE, RTLD_NOW | RTLD_LOCAL);
#else
  return false;
#endif
}

}  // namespace

TEST_SUITE_BEGIN("fuzz");

TEST_CASE("every input of the fuzz targets keeps the promises of the code") {
  const std::filesystem::path seeds = KVXFER_SEEDS;
  const bool double_there = loads_double();
  for (const fuzz::Target& target : fuzz::kTargets) {
    if (target.on_gpu && !double_there) continue;
    target.run({});
    CHECK_MESSAGE(replay(target, seeds / target.name) > 0, target.name);
    replay(target, seeds / "found" / target.name);
  }
  fuzz::Device::close();
}

TEST_SUITE_END();
