#include "correct_peer.hpp"

#include "bootstrap/bytes.hpp"

namespace kvxfer::fuzz {
namespace {

constexpr std::size_t kMacBytes = 32;

SignedReply after_reply(std::string_view hello, std::string_view unsigned_reply) {
  SignedReply reply;
  reply.transcript = std::string(hello) + std::string(unsigned_reply) + std::string(kMacBytes, 0);
  const Mac mac = hmac_sha256(kClusterKey, "kvxfer reply", reply.transcript);
  reply.bytes = std::string(unsigned_reply) + std::string(view(mac));
  reply.session_key = view(hmac_sha256(kClusterKey, "kvxfer session key", reply.transcript));
  return reply;
}

}  // namespace

Identity identity_of(std::uint8_t engine) {
  Identity self{.cluster_key = kClusterKey,
                .engine = {},
                .introduction = {.name = "fuzzed",
                                 .host = "host",
                                 .local = true,
                                 .tcp = true,
                                 .lanes = 2,
                                 .heartbeat_ns = 100'000'000,
                                 .nics = {{"nic0", "simulated", 100'000'000'000u}}}};
  self.engine.bytes.fill(engine);
  return self;
}

SignedReply sign_reply(std::string_view hello, const EngineId& server) {
  const std::string nonce(32, 'n');
  std::string head = ByteWriter().put(std::uint16_t{0}).put(kNewestVersion).put(server).take();
  return after_reply(hello, head + nonce);
}

SignedReply read_reply(std::string_view hello, std::string_view reply) {
  return after_reply(hello, reply.substr(0, kReplyBytes - kMacBytes));
}

std::string sign_introduction(std::string_view body, std::string_view key,
                              std::string_view transcript, std::string_view purpose) {
  const Mac mac = hmac_sha256(key, purpose, std::string(transcript) + std::string(body));
  return ByteWriter().put(std::uint16_t{0}).put(static_cast<std::uint16_t>(body.size())).take() +
         std::string(view(mac)) + std::string(body);
}

}  // namespace kvxfer::fuzz
