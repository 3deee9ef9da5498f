// The handshake in which two engines prove to each other that they know the cluster key, before any
// memory is reachable. No I/O: bytes in, bytes out. docs/protocol.md has the message diagram.
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

// The protocol versions of this engine; two engines use the newest that both speak.
inline constexpr std::uint16_t kOldestVersion = 2;
inline constexpr std::uint16_t kNewestVersion = 4;
// Since this version an immediate may count for a group of writes.
inline constexpr std::uint16_t kGroupsVersion = 3;
// Since this version the ends of a NIC path report what they know before they close (path_stop),
// and the ends of a local path report when they have closed memory of the peer's GPUs.
inline constexpr std::uint16_t kPathStopVersion = 4;
inline constexpr std::size_t kHelloBytes = 72;
inline constexpr std::uint16_t kMaxLanes = 64;
inline constexpr std::size_t kMaxNameBytes = 128;
inline constexpr std::uint64_t kMaxHeartbeatNs = 60'000'000'000u;

using SessionId = std::array<std::uint8_t, 16>;

// The data that each side sends about itself, covered by its MAC.
struct Introduction {
  std::string name;
  std::string host;  // equal on engines that share a boot and a network namespace
  bool local = false;
  bool tcp = false;
  std::uint16_t lanes = 0;         // kMaxLanes or fewer
  std::uint64_t heartbeat_ns = 0;  // heartbeat interval
  std::vector<NicInfo> nics;       // kMaxNics or fewer

  std::string encode() const;
  static std::optional<Introduction> decode(std::string_view bytes);
};

// The result of a handshake, on both sides.
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
  // `target` is the expected engine: another one at its address is refused. any() stands for no
  // particular engine.
  ClientHandshake(const Identity& self, EngineId target);

  std::string hello() const { return transcript_.substr(0, kHelloBytes); }
  // Takes complete messages from `in`, and appends answers to `out`. Returns true once done.
  Result<bool> advance(std::string& in, std::string& out);
  const Session& session() const { return session_; }
  // True if an engine that knows the cluster key has answered.
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

  // Like ClientHandshake::advance(). An error is the client's fault; `out` then holds the answer to
  // send before closing.
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

// The purpose of a first message of kHelloBytes.
enum class HelloKind { control, lane, unknown };
HelloKind hello_kind(std::string_view hello);
LaneHello decode_lane_hello(std::string_view hello);
bool lane_hello_valid(std::string_view hello, const std::string& session_key);

inline constexpr std::string_view kLaneAccepted = "LNOK";

}  // namespace kvxfer
