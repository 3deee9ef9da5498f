// The entry of one libFuzzer program; KVXFER_TARGET is its function of targets.hpp.
#include <cstddef>
#include <cstdint>

#include "targets.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvxfer::fuzz::KVXFER_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}
