// An engine that knows the cluster key, and signs messages that the fuzzer makes up.
#pragma once

#include <string>
#include <string_view>

#include "bootstrap/handshake.hpp"

namespace kvxfer::fuzz {

inline const std::string kClusterKey = "the key of the fuzzed cluster";

Identity identity_of(std::uint8_t engine);

// A signed reply to a hello, its transcript, and the key of the session that follows.
struct SignedReply {
  std::string bytes;
  std::string transcript;
  std::string session_key;
};
SignedReply sign_reply(std::string_view hello, const EngineId& server);
// Returns a signed proof or accept; `key` and `transcript` are those of the session so far.
std::string sign_introduction(std::string_view body, std::string_view key,
                              std::string_view transcript, std::string_view purpose);
// Returns what follows from a reply that was received.
SignedReply read_reply(std::string_view hello, std::string_view reply);

inline constexpr std::size_t kReplyBytes = 84;

}  // namespace kvxfer::fuzz
