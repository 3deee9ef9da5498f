// How two engines prove to each other that they know the cluster key, before any memory is
// reachable. No I/O: bytes in, bytes out. docs/protocol.md has the message diagram.
//
//   client → server   hello    ids of both, nonce
//   server → client   reply    id, nonce, MAC over both        (the server knows the key)
//   client → server   proof    introduction, MAC over all      (the client knows the key)
//   server → client   accept   introduction, MAC over all
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/authenticator.hpp"
#include "kvxfer/types.hpp"

namespace kvxfer {

// This engine speaks these; two use the newest that both do.
inline constexpr std::uint16_t kOldestVersion = 2;
inline constexpr std::uint16_t kNewestVersion = 4;
// Since this one an immediate may count for a group of writes.
inline constexpr std::uint16_t kGroupsVersion = 3;
// Since this one the ends of a NIC's path say what they know before they close (path_stop), and
// those of a local path when they have closed memory of the peer's GPUs.
inline constexpr std::uint16_t kPathStopVersion = 4;
inline constexpr std::size_t kHelloBytes = 72;
inline constexpr std::uint16_t kMaxLanes = 64;
inline constexpr std::size_t kMaxNameBytes = 128;
inline constexpr std::uint64_t kMaxHeartbeatNs = 60'000'000'000u;

using SessionId = std::array<std::uint8_t, 16>;

// What each side says of itself, covered by its MAC.
struct Introduction {
  std::string name;
  std::string host;  // equal on engines that share a boot and a network namespace
  bool local = false;
  bool tcp = false;
  std::uint16_t lanes = 0;         // at most kMaxLanes
  std::uint64_t heartbeat_ns = 0;  // its interval
  std::vector<NicInfo> nics;       // at most kMaxNics

  std::string encode() const;
  static std::optional<Introduction> decode(std::string_view bytes);
};

// What both sides hold after the handshake.
struct Session {
  SessionId id{};
  std::string key;  // derived from the cluster key and both nonces
  std::uint16_t version = kOldestVersion;
  EngineId peer;
  Introduction introduction;  // the peer's
};

struct Identity {
  std::string cluster_key;
  EngineId engine;
  Introduction introduction;
};

class ClientHandshake {
 public:
  // `target` is the engine that is meant: another one at its address is refused. any() means none
  // in particular.
  ClientHandshake(const Identity& self, EngineId target);

  std::string hello() const { return transcript_.substr(0, kHelloBytes); }
  // Takes what it understands from `in`, appends answers to `out`. True once done.
  Result<bool> advance(std::string& in, std::string& out);
  const Session& session() const { return session_; }
  // Whether an engine that knows the cluster key has answered.
  bool replied() const { return proved_; }

 private:
  const Identity& self_;
  EngineId target_;
  std::string transcript_;  // every byte that both sides have seen, for the MACs
  Session session_;
  bool proved_ = false;
};

class ServerHandshake {
 public:
  explicit ServerHandshake(const Identity& self) : self_(self) {}

  // Errors are the client's fault; `out` then holds what to tell it before closing.
  Result<bool> advance(std::string& in, std::string& out);
  const Session& session() const { return session_; }

 private:
  const Identity& self_;
  std::string transcript_;
  Session session_;
  bool replied_ = false;
};

// The first bytes of a further connection of a session: a tcp lane or a local rendezvous.
struct LaneHello {
  SessionId session{};
  std::uint32_t lane = 0;

  std::string encode(const std::string& session_key) const;
};

// What a first message of kHelloBytes asks for.
enum class HelloKind { control, lane, unknown };
HelloKind hello_kind(std::string_view hello);
LaneHello decode_lane_hello(std::string_view hello);
bool lane_hello_valid(std::string_view hello, const std::string& session_key);

inline constexpr std::string_view kLaneAccepted = "LNOK";

}  // namespace kvxfer
