#include "refusal.hpp"

#include <string>

namespace kvxfer {

Error refusal(Errc status, const Operation& operation, std::string_view peer) {
  const std::string at = " at peer " + std::string(peer);
  switch (status) {
    case Errc::unknown_region:
      return {status, "write refused: no memory region with this key is registered" + at +
                          "; the region was deregistered, or the descriptor is foreign or a grant "
                          "for another peer"};
    case Errc::out_of_bounds:
      return {status, "write refused: it leaves the destination region" + at +
                          ", or its source memory is no longer mapped"};
    case Errc::stale_counter:
      return {status,
              "write refused: counter " + std::to_string(operation.imm.value_or(0)) +
                  " is not live" + at +
                  ", or was allocated for another peer; its transfer was cancelled or has ended"};
    case Errc::permission_denied:
      return {status, "write failed: the operating system does not let peer " + std::string(peer) +
                          " read this process's memory"};
    case Errc::out_of_memory:
      return {status, "write refused: no NIC has a memory window left for its grant" + at +
                          "; let fewer transfers run at once"};
    case Errc::gpu_lost:
      return {status, "write refused: the GPU of its destination has failed" + at +
                          "; restart that process"};
    default:
      return {status, "write refused with " + std::string(name(status)) + at};
  }
}

}  // namespace kvxfer
