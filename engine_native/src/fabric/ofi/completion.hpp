// What an endpoint's completion queue tells a path.
#pragma once

#include <cstdint>
#include <optional>

#include "kvxfer/error.hpp"
#include "kvxfer/types.hpp"

namespace kvxfer::ofi {

class CompletionSink {
 public:
  // The write is delivered.
  virtual void on_written(std::uint64_t sequence) = 0;
  virtual void on_arrived(Imm imm, std::uint64_t writes, std::uint64_t bytes) = 0;
  // A write was not delivered, or the endpoint is broken.
  virtual void on_failed(Error error) = 0;

 protected:
  ~CompletionSink() = default;
};

struct Completion {
  CompletionSink* path;
  std::uint64_t sequence = 0;  // of a write of ours
  std::optional<Imm> imm;      // of one that arrived
  std::uint64_t bytes = 0;
};

}  // namespace kvxfer::ofi
