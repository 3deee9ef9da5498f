#include "bootstrap/handshake.hpp"

#include <algorithm>

#include "bootstrap/bytes.hpp"
#include "random.hpp"

namespace kvxfer {
namespace {

constexpr std::array<char, 4> kMagic{'K', 'V', 'X', 'F'};
constexpr std::size_t kMaxIntroduction = 16384;
using Nonce = std::array<std::uint8_t, 32>;

enum class Purpose : std::uint8_t { control = 1, lane = 2 };

struct Prefix {
  std::array<char, 4> magic = kMagic;
  std::uint16_t version = kOldestVersion;
  Purpose purpose = Purpose::control;
  std::uint8_t newest = kNewestVersion;  // 0 in version 2
};
static_assert(sizeof(Prefix) == 8);

struct Hello {
  Prefix prefix;
  EngineId engine;
  EngineId target;
  Nonce nonce{};
};
static_assert(sizeof(Hello) == kHelloBytes);

struct Reply {
  std::uint16_t status = 0;                // an Errc; the rest is meaningless unless ok
  std::uint16_t version = kOldestVersion;  // the session's
  EngineId engine;
  Nonce nonce{};
  Mac mac{};
};
static_assert(sizeof(Reply) == 84);

struct LaneHelloWire {
  Prefix prefix;
  SessionId session{};
  std::uint32_t lane = 0;
  std::array<std::uint8_t, 12> reserved{};
  Mac mac{};
};
static_assert(sizeof(LaneHelloWire) == kHelloBytes);

// The head of `proof` and `accept`; an introduction of `size` bytes follows.
struct Proof {
  std::uint16_t status = 0;
  std::uint16_t size = 0;
  Mac mac{};
};
static_assert(sizeof(Proof) == 36);

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

template <class T>
std::optional<T> take(std::string& in) {
  if (in.size() < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, in.data(), sizeof value);
  in.erase(0, sizeof value);
  return value;
}

Error not_kvxfer() {
  return {Errc::connect_failed,
          "the server there is no kvxfer engine: it does not speak the protocol versions " +
              std::to_string(kOldestVersion) + " to " + std::to_string(kNewestVersion)};
}

bool refused_as_restarted(std::uint16_t status) {
  return status == static_cast<std::uint16_t>(Errc::peer_restarted);
}

bool known_version(std::uint16_t version) {
  return version >= kOldestVersion && version <= kNewestVersion;
}

// True if the received bytes can be a Reply. Another server's answer may be shorter.
bool may_be_reply(std::string_view in) {
  std::array<std::uint16_t, 2> head{};
  if (in.size() < sizeof head) return true;
  std::memcpy(head.data(), in.data(), sizeof head);
  const auto [status, version] = head;
  return status == 0 ? known_version(version) : refused_as_restarted(status);
}

Error wrong_key() {
  return {Errc::authentication_failed,
          "the two engines have different cluster keys; give both the same cluster_key"};
}

Error restarted(const EngineId& target) {
  return {Errc::peer_restarted, "engine " + target.hex() +
                                    " no longer runs at that address, another one does (the peer "
                                    "was restarted); look up its new address"};
}

Session derive(std::string_view cluster_key, std::string_view transcript) {
  Session session;
  session.key = view(hmac_sha256(cluster_key, "kvxfer session key", transcript));
  const Mac id = hmac_sha256(session.key, "kvxfer session id", "");
  std::memcpy(session.id.data(), id.data(), session.id.size());
  return session;
}

// The result of reading a Proof and its introduction, and checking the MAC, once both have arrived.
struct ProofResult {
  Errc status = Errc::ok;
  bool complete = false;
  std::optional<Introduction> introduction;
};

ProofResult read_proof(std::string& in, std::string& transcript, const std::string& key,
                       std::string_view purpose) {
  if (in.size() < sizeof(Proof)) return {};
  Proof proof;
  std::memcpy(&proof, in.data(), sizeof proof);
  if (proof.status != 0) return {.status = static_cast<Errc>(proof.status), .complete = true};
  if (proof.size > kMaxIntroduction) return {.complete = true};
  if (in.size() < sizeof(Proof) + proof.size) return {};
  const std::string body = in.substr(sizeof(Proof), proof.size);
  in.erase(0, sizeof(Proof) + proof.size);
  transcript += body;
  if (!equal(proof.mac, hmac_sha256(key, purpose, transcript))) return {.complete = true};
  return {.complete = true, .introduction = Introduction::decode(body)};
}

std::string write_proof(const Introduction& introduction, std::string& transcript,
                        const std::string& key, std::string_view purpose) {
  const std::string body = introduction.encode();
  transcript += body;
  const Proof proof{.status = 0,
                    .size = static_cast<std::uint16_t>(body.size()),
                    .mac = hmac_sha256(key, purpose, transcript)};
  return std::string(bytes_of(proof)) + body;
}

}  // namespace

std::string Introduction::encode() const {
  ByteWriter writer;
  writer.text(name).text(host).put(local).put(tcp).put(lanes).put(heartbeat_ns);
  writer.put(static_cast<std::uint16_t>(nics.size()));
  for (const NicInfo& nic : nics) {
    writer.text(nic.name).text(nic.network).put(nic.bits_per_second);
  }
  return writer.take();
}

std::optional<Introduction> Introduction::decode(std::string_view bytes) {
  ByteReader reader(bytes);
  Introduction introduction;
  introduction.name = reader.text();
  introduction.host = reader.text();
  introduction.local = reader.get<std::uint8_t>() != 0;
  introduction.tcp = reader.get<std::uint8_t>() != 0;
  introduction.lanes = reader.get<std::uint16_t>();
  introduction.heartbeat_ns = reader.get<std::uint64_t>();
  const auto nics = reader.get<std::uint16_t>();
  for (std::uint16_t i = 0; i < nics && i < kMaxNics && reader.good(); ++i) {
    NicInfo& nic = introduction.nics.emplace_back();
    nic.name = reader.text();
    nic.network = reader.text();
    nic.bits_per_second = reader.get<std::uint64_t>();
  }
  if (!reader.finished() || introduction.name.size() > kMaxNameBytes ||
      introduction.lanes > kMaxLanes || introduction.heartbeat_ns > kMaxHeartbeatNs) {
    return std::nullopt;
  }
  return introduction;
}

ClientHandshake::ClientHandshake(const Identity& self, EngineId target)
    : self_(self), target_(target) {
  Hello hello{.prefix = {}, .engine = self.engine, .target = target};
  random_bytes(hello.nonce.data(), hello.nonce.size());
  transcript_ = bytes_of(hello);
}

Result<bool> ClientHandshake::advance(std::string& in, std::string& out) {
  if (!proved_) {
    if (!may_be_reply(in)) return not_kvxfer();
    const auto reply = take<Reply>(in);
    if (!reply) return false;
    if (refused_as_restarted(reply->status)) return restarted(target_);
    if (!target_.any() && reply->engine != target_) return restarted(target_);
    if (reply->engine.any()) return not_kvxfer();
    if (reply->engine == self_.engine) {
      return Error{Errc::invalid_argument, "an engine cannot connect to itself"};
    }
    Reply unsigned_reply = *reply;
    unsigned_reply.mac = {};
    transcript_ += bytes_of(unsigned_reply);
    if (!equal(reply->mac, hmac_sha256(self_.cluster_key, "kvxfer reply", transcript_))) {
      return wrong_key();
    }
    session_ = derive(self_.cluster_key, transcript_);
    session_.peer = reply->engine;
    session_.version = reply->version;
    out += write_proof(self_.introduction, transcript_, session_.key, "kvxfer proof");
    proved_ = true;
  }
  auto accept = read_proof(in, transcript_, session_.key, "kvxfer accept");
  if (!accept.complete) return false;
  if (!accept.introduction) return wrong_key();
  session_.introduction = std::move(*accept.introduction);
  return true;
}

Result<bool> ServerHandshake::advance(std::string& in, std::string& out) {
  if (!replied_) {
    const auto hello = take<Hello>(in);
    if (!hello) return false;
    const auto version =
        std::clamp<std::uint16_t>(hello->prefix.newest, kOldestVersion, kNewestVersion);
    Reply reply{.status = 0, .version = version, .engine = self_.engine};
    if (!hello->target.any() && hello->target != self_.engine) {
      reply.status = static_cast<std::uint16_t>(Errc::peer_restarted);
      out += bytes_of(reply);
      return Error{Errc::peer_restarted, "it asked for an engine that no longer runs here"};
    }
    random_bytes(reply.nonce.data(), reply.nonce.size());
    transcript_ = std::string(bytes_of(*hello)) + std::string(bytes_of(reply));
    reply.mac = hmac_sha256(self_.cluster_key, "kvxfer reply", transcript_);
    out += bytes_of(reply);
    session_ = derive(self_.cluster_key, transcript_);
    session_.peer = hello->engine;
    session_.version = version;
    replied_ = true;
  }
  auto proof = read_proof(in, transcript_, session_.key, "kvxfer proof");
  if (!proof.complete) return false;
  if (!proof.introduction) {
    const Proof refused{.status = static_cast<std::uint16_t>(Errc::authentication_failed)};
    out += bytes_of(refused);
    return Error{Errc::authentication_failed, "it does not know the cluster key"};
  }
  session_.introduction = std::move(*proof.introduction);
  out += write_proof(self_.introduction, transcript_, session_.key, "kvxfer accept");
  return true;
}

HelloKind hello_kind(std::string_view hello) {
  Prefix prefix;
  if (hello.size() < sizeof prefix) return HelloKind::unknown;
  std::memcpy(&prefix, hello.data(), sizeof prefix);
  if (prefix.magic != kMagic || prefix.version != kOldestVersion) return HelloKind::unknown;
  if (prefix.purpose == Purpose::control) return HelloKind::control;
  if (prefix.purpose == Purpose::lane) return HelloKind::lane;
  return HelloKind::unknown;
}

std::string LaneHello::encode(const std::string& session_key) const {
  LaneHelloWire wire{.prefix = {.purpose = Purpose::lane}, .session = session, .lane = lane};
  wire.mac = hmac_sha256(session_key, "kvxfer lane", bytes_of(wire));
  return std::string(bytes_of(wire));
}

LaneHello decode_lane_hello(std::string_view hello) {
  LaneHelloWire wire;
  std::memcpy(&wire, hello.data(), sizeof wire);
  return {.session = wire.session, .lane = wire.lane};
}

bool lane_hello_valid(std::string_view hello, const std::string& session_key) {
  LaneHelloWire wire;
  std::memcpy(&wire, hello.data(), sizeof wire);
  const Mac mac = std::exchange(wire.mac, {});
  return equal(mac, hmac_sha256(session_key, "kvxfer lane", bytes_of(wire)));
}

}  // namespace kvxfer
