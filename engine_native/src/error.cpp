#include "kvxfer/error.hpp"

namespace kvxfer {

std::string_view name(Errc code) {
  switch (code) {
    case Errc::ok:
      return "ok";
    case Errc::invalid_argument:
      return "invalid-argument";
    case Errc::engine_closed:
      return "engine-closed";
    case Errc::address_in_use:
      return "address-in-use";
    case Errc::out_of_memory:
      return "out-of-memory";
    case Errc::unknown_region:
      return "unknown-region";
    case Errc::out_of_bounds:
      return "out-of-bounds";
    case Errc::stale_counter:
      return "stale-counter";
    case Errc::cancelled:
      return "cancelled";
    case Errc::deadline_exceeded:
      return "deadline-exceeded";
    case Errc::backpressure:
      return "backpressure";
    case Errc::message_too_large:
      return "message-too-large";
    case Errc::permission_denied:
      return "permission-denied";
    case Errc::gpu_lost:
      return "gpu-lost";
    case Errc::connect_failed:
      return "connect-failed";
    case Errc::authentication_failed:
      return "authentication-failed";
    case Errc::peer_restarted:
      return "peer-restarted";
    case Errc::peer_lost:
      return "peer-lost";
    case Errc::peer_timeout:
      return "peer-timeout";
    case Errc::protocol_error:
      return "protocol-error";
    case Errc::fabric_unavailable:
      return "fabric-unavailable";
    case Errc::nic_lost:
      return "nic-lost";
  }
  return "protocol-error";
}

}  // namespace kvxfer
