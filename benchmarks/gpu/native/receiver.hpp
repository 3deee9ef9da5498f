// The other process, which has the destination pool and checks what arrived.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "kvxfer/types.hpp"

namespace kvxfer::gpu_bench {

inline constexpr const char* kClusterKey = "a key for this benchmark only";

// Returns the options of an engine with one fabric.
EngineOptions options_of(const std::string& fabric, const std::string& name);

// Forks the receiver. Must precede any call of CUDA, whose context does not survive a fork.
class Receiver {
 public:
  Receiver();
  ~Receiver();
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  struct Opened {
    EngineAddress address;
    MrDescriptor destination;
    Imm imm = 0;
  };
  // Opens a new engine with a destination pool, in place of the last one.
  Opened open(const std::string& fabric, bool on_gpu);
  // Returns how many words of the pool are wrong after a request of such pages; zeroes the pool.
  std::size_t check(std::size_t page_bytes, std::size_t request_bytes);
  // Begins the receiving side of probes::tcp_send(), connected to that port; end_tcp() awaits its
  // end.
  void begin_tcp(int port, std::size_t times);
  void end_tcp();

 private:
  void tell(const std::string& line);
  std::string reply();
  std::string ask(const std::string& line);

  int socket_ = -1;
  pid_t child_ = 0;
};

}  // namespace kvxfer::gpu_bench
