// The delay of a write that waits for a stream.
#pragma once

#include "kvxfer/engine.hpp"

namespace kvxfer::gpu_bench {

// Connects two engines. Returns once they are connected.
PeerId connect(TransferEngine& from, const TransferEngine& to);

// Medians of many rounds, in nanoseconds after the wait of a stream ends.
struct Reactions {
  double spinner;  // until a thread that does nothing else sees the word that the stream counts up
  double written;  // until the first bytes of a write that waits for that word are at the peer
};
Reactions measure_reactions();

}  // namespace kvxfer::gpu_bench
