// One submitted write operation: its writes, and how far they got. Engine thread only once posted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvxfer/types.hpp"
#include "memory_region.hpp"

namespace kvxfer {

// No write on the wire is longer: bounds how long a lane is busy and lets large ones be shared
// out over lanes.
inline constexpr std::uint32_t kMaxWriteBytes = 1u << 20;

// One write on the wire. Offsets from the start of source and destination region.
struct WireWrite {
  std::uint64_t source = 0;
  std::uint64_t destination = 0;
  std::uint32_t length = 0;
};

struct Operation {
  OperationId id = 0;
  PeerId peer = 0;
  RegionPtr source;  // null for an immediate without bytes
  std::uint64_t destination_key = 0;
  std::optional<Imm> imm;
  std::vector<WireWrite> writes;
  std::uint64_t bytes = 0;
  std::uint64_t deadline_ns = 0;

  std::size_t posted = 0;             // writes[0, posted) were given to a path
  std::size_t finished = 0;           // of those, delivered or refused
  std::size_t finished_at_grace = 0;  // when it last got more time to end
  Errc code = Errc::ok;               // first failure; nothing is posted after it
  std::string text;

  bool wants_post() const { return code == Errc::ok && posted < writes.size(); }
  bool done() const { return finished == posted && !wants_post(); }
  void fail(Errc why, std::string what) {
    if (code != Errc::ok) return;
    code = why;
    text = std::move(what);
  }
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace kvxfer
