// Memory of GPUs that tests fill, read and take away.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "doubles/cuda_driver.hpp"
#include "support.hpp"

namespace kvxfer::test {

// Memory of an engine, of the host or of GPU 0, whose bytes a test may read and write.
class Memory {
 public:
  Memory(TestEngine& engine, bool on_gpu, std::size_t size);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  const RegionPtr& region() const { return region_; }
  Bytes read() const { return read(0, region_->size()); }
  Bytes read(std::size_t offset, std::size_t size) const;
  void write(const Bytes& bytes) const { write(0, bytes); }
  void write(std::size_t offset, const Bytes& bytes) const;

 private:
  TestEngine& engine_;
  RegionPtr region_;
};

// An address of GPU 0 at which memory of cuMemCreate is mapped and unmapped, as when an inference
// engine wakes and sleeps. With `files`, other processes may map the memory.
class Sleeper {
 public:
  explicit Sleeper(std::size_t blocks = 1, bool files = false);
  ~Sleeper();
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  void wake();
  void sleep() const;
  CUdeviceptr address() const { return address_; }
  std::size_t size() const { return handles_.size() * kBlock; }

 private:
  bool files_;
  CUdeviceptr address_ = 0;
  std::vector<CUmemGenericAllocationHandle> handles_;
};

Bytes random_bytes_of(Random& random, std::size_t size);

// The fabrics that move GPU memory. NICs with GPUDirect are among them only on the double, as
// simulated NICs cannot access the memory of a GPU.
std::vector<std::string> gpu_fabrics();

}  // namespace kvxfer::test
