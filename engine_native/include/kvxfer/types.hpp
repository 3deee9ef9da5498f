// Plain data of the engine's interface.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvxfer/error.hpp"

namespace kvxfer {

using PeerId = std::uint32_t;       // one connection to one peer engine; never reused
using OperationId = std::uint64_t;  // never reused
using Imm = std::uint32_t;          // immediate: counter slot and generation
using Duration = std::chrono::nanoseconds;

inline constexpr std::size_t kMaxMessageBytes = std::size_t{1} << 20;
inline constexpr std::size_t kMinClusterKeyBytes = 16;
inline constexpr std::size_t kMaxNics = 64;  // of one engine

// Names one start of one engine: 16 random bytes, so a restarted engine is a different one.
struct EngineId {
  std::array<std::uint8_t, 16> bytes{};
  bool operator==(const EngineId& other) const {
    return std::memcmp(bytes.data(), other.bytes.data(), sizeof bytes) == 0;  // inlined
  }
  // All zero: as a target, whichever engine listens at the address and knows the cluster key.
  bool any() const { return *this == EngineId{}; }
  std::string hex() const;
  static Result<EngineId> from_hex(std::string_view text);
};

// Where an engine listens. Text form: kvx://HOST:PORT/ENGINE_ID
struct EngineAddress {
  std::string host;
  std::uint16_t port = 0;
  EngineId engine;
  std::string text() const;
  static Result<EngineAddress> parse(std::string_view text);
};

// Whether a fabric that needs hardware is used.
enum class FabricUse : std::uint8_t {
  never,
  if_available,  // used with peers that have it too, where this host has its library and a NIC
  required,      // creating the engine fails where this host lacks something for it
};

// A NIC of an engine, as its peers see it. NICs are numbered from 0 within an engine: verbs first.
struct NicInfo {
  std::string name;     // of the device: mlx5_0, rxe0, rdmap0s6
  std::string network;  // NICs reach each other where this is equal: roce, infiniband, ofi-efa
  std::uint64_t bits_per_second = 0;
  bool operator==(const NicInfo&) const = default;
};

class MemoryRegion;

// Makes NICs of a kind that the engine does not have: see src/fabric/nic/nic_domain.hpp.
class NicFactory;

struct EngineOptions {
  std::string cluster_key;         // shared by all engines that may talk; at least 16 bytes
  std::string name;                // for error texts; need not be unique
  std::string host = "127.0.0.1";  // numeric address to listen on
  std::string advertise;           // address to give to peers; empty: host
  std::uint16_t port = 0;          // 0: any free port
  bool local = true;               // use the local fabric with peers on this host
  bool tcp = true;                 // use the tcp fabric
  FabricUse verbs = FabricUse::never;
  FabricUse ofi = FabricUse::never;
  std::vector<std::string> nics;     // of those to use: DEVICE, DEVICE:PORT; empty: all
  int traffic_class = 0;             // of verbs packets, 0 to 255: DSCP << 2 | ECN on RoCE
  int service_level = 0;             // of verbs packets, 0 to 7: the priority on RoCE
  int gid_index = -1;                // of verbs ports; -1: chosen by address
  int pkey = 0;                      // partition of InfiniBand ports; 0: the first full one
  unsigned path_mtu = 0;             // bytes, 256 to 4096, at most the port's; 0: the port's
  bool memory_windows = true;        // of verbs: NICs keep peers within what they are granted
  unsigned paths_per_nic_pair = 1;   // queue pairs, each a separate flow to ECMP and LAG
  std::string ofi_provider = "efa";  // libfabric's name of it
  unsigned ofi_endpoints = 1;        // per libfabric domain, each standing for a NIC
  bool ofi_strict = false;           // hold any provider to EFA's limits and disorder
  bool thread = true;  // an engine thread; false: the engine works in TransferEngine::poll()
  std::vector<unsigned> cpus;             // where the engine thread may run; empty: anywhere
  std::shared_ptr<NicFactory> more_nics;  // null: none
  unsigned lanes = 2;                     // tcp domains, each with one connection per peer
  std::size_t window_bytes = std::size_t{16} << 20;  // unacknowledged bytes per peer over tcp
  Duration heartbeat_interval = std::chrono::milliseconds(100);
  Duration peer_timeout = std::chrono::milliseconds(700);
  Duration path_timeout = std::chrono::seconds(1);        // of a NIC's path that delivers nothing
  Duration operation_timeout = std::chrono::seconds(30);  // deadline of operations without one
  Duration spin = std::chrono::microseconds(200);         // busy polling after the last progress
};

// Where memory is, which decides by what ways it is reached.
enum class MemoryKind : std::uint8_t { host, cuda };

// What a peer needs to write into a region: opaque bytes of fixed size, safe to pass on.
struct MrDescriptor {
  EngineId engine;
  std::uint64_t key = 0;
  std::uint64_t length = 0;
  Imm imm = 0;  // of a grant: the only immediate that writes with it may carry
  MemoryKind kind = MemoryKind::host;
  std::uint8_t device = 0;  // of cuda: its number in the process that registered the region

  static constexpr std::size_t kBytes = 4 + 16 + 3 * 8;
  std::string encode() const;
  static Result<MrDescriptor> decode(std::string_view bytes);
};

// One contiguous write. Offsets are bytes from the start of the source and destination region.
struct SingleWrite {
  std::uint64_t source_offset = 0;
  std::uint64_t destination_offset = 0;
  std::uint64_t length = 0;
};

// Page i moves page_length bytes from source_offset + source_pages[i] * source_stride
// to destination_offset + destination_pages[i] * destination_stride.
struct PagedWrite {
  std::uint64_t page_length = 0;
  std::span<const std::int64_t> source_pages;
  std::span<const std::int64_t> destination_pages;
  std::uint64_t source_stride = 0;
  std::uint64_t destination_stride = 0;
  std::uint64_t source_offset = 0;
  std::uint64_t destination_offset = 0;
};

// A word of host memory that compute counts up, to start transfers: see TransferEngine::watch_word.
struct WatchWord {
  alignas(64) std::atomic<std::uint64_t> value = 0;
};

// A write is held back until the word has reached this value.
struct WatchFor {
  std::shared_ptr<const WatchWord> word;  // null: it is not held back
  std::uint64_t value = 0;
};

// A watch word that streams of a GPU count up: see TransferEngine::stream_word.
class StreamWord {
 public:
  virtual ~StreamWord() = default;
  // Queues on a CUstream of the GPU's primary context that the word grows by `by` when all that the
  // stream has before it has ended; where the stream is captured, at each run of the graph. One
  // stream at a time: the word must not be destroyed, nor another stream be used, before.
  virtual Result<void> add_on(void* stream, std::uint64_t by) = 0;
  // For WriteOptions::after.
  virtual std::shared_ptr<const WatchWord> word() const = 0;
};

// What a stream of a GPU waits for: see TransferEngine::wait_on_stream.
class StreamWait {
 public:
  virtual ~StreamWait() = default;
  // False while the stream waits. Fails with what has ended the wait in place of the counter: then
  // what follows in the stream runs without the bytes.
  virtual Result<bool> reached() const = 0;
  // The same for work of the GPU: the lowest byte is 1 once the counter got there, more where it
  // failed. Pinned host memory, at the address that the GPU knows it by.
  virtual const std::atomic<std::uint64_t>& word() const = 0;
};

// A counter as work of a GPU reads it: see TransferEngine::mirror_counter.
class CounterMirror {
 public:
  virtual ~CounterMirror() = default;
  // The count, from bit 8 on. The lowest byte is 0 while the counter is live, then more. Pinned
  // host memory, at the address that the GPU knows it by.
  virtual const std::atomic<std::uint64_t>& word() const = 0;
};

struct WriteOptions {
  std::optional<Imm> imm;            // counts at the receiver: see Submitted
  Duration timeout{};                // 0: the engine's operation_timeout
  std::optional<std::uint32_t> nic;  // only over this NIC of ours; see TransferEngine::nics()
  WatchFor after{};
};

// Bytes of a registered region.
struct RegionRange {
  std::shared_ptr<MemoryRegion> region;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

// One of many writes to one peer, each out of a region into a region.
struct ListedWrite {
  std::shared_ptr<MemoryRegion> source;
  MrDescriptor destination;
  SingleWrite write;
};

// A part of a scatter, to one peer.
struct ScatterPart {
  std::size_t member = 0;  // of the group
  MrDescriptor destination;
  SingleWrite write;  // length 0: the immediate alone
};

// What a counter waits for.
enum class Expect : std::uint8_t { exactly, at_least };

// What submitting returns. Where every network that both engines have keeps the order of writes,
// one immediate counts for a group of up to 32.
struct Submitted {
  OperationId id = 0;
  std::uint64_t writes = 0;      // on the wire
  std::uint64_t immediates = 0;  // the receiver's counter grows by so many in all
  std::uint64_t bytes = 0;
};

// What submitting to several peers returns: one operation.
struct Scattered {
  OperationId id = 0;
  std::uint64_t writes = 0;               // to all of them
  std::vector<std::uint64_t> immediates;  // in the order of the peers: what each counter grows by
  std::uint64_t bytes = 0;                // to all of them
};

// How a part of an operation failed: what was to go from one region to one region of one peer.
struct PartFailure {
  std::size_t part = 0;  // in the order in which they were submitted
  PeerId peer = 0;
  Errc code = Errc::ok;
  std::string text;
};

struct Completion {
  enum class Kind : std::uint8_t {
    connect,
    write,
    counter,
    arrival,
    released,
    peer_up,
    peer_down,
    message,
    notice,
  };
  Kind kind = Kind::write;
  // The operation. The immediate for counter, arrival and released. peer_up: 1 if the peer has
  // connected, 0 if this engine has.
  std::uint64_t id = 0;
  PeerId peer = 0;
  Errc code = Errc::ok;
  std::string text;                // of an error or a notice; peer_up: the peer's name
  std::string data;                // message payload; peer_up: the peer's engine id (hex)
  std::string fabric;              // peer_up only
  std::uint64_t timestamp_ns = 0;  // CLOCK_MONOTONIC
  // write: the parts that failed; code, text and peer are of the first.
  std::vector<PartFailure> failed;
};

// How often something was refused, and why.
struct Refusals {
  std::uint64_t total = 0;
  std::array<std::uint64_t, kErrcs> by_code{};

  void count(Errc why, std::uint64_t times = 1) {
    total += times;
    by_code[static_cast<std::size_t>(why)] += times;
  }
};

struct EngineStats {
  std::uint64_t bytes_sent = 0;       // delivered payload
  std::uint64_t bytes_staged = 0;     // of that, out of a GPU by way of host memory
  std::uint64_t bytes_received = 0;   // payload placed by this engine: NICs do not tell
  std::uint64_t writes_posted = 0;    // given to a path, also again
  std::uint64_t writes_sent = 0;      // of those, delivered
  std::uint64_t writes_received = 0;  // over NICs: immediates, which are all that it sees
  Refusals writes_refused;            // arrived and dropped: no region, bounds or live counter
  Refusals handshakes_refused;  // connections that were not let in: strangers, lanes, rendezvous
  Refusals peers_refused;       // peers cut off for what they did
  std::uint64_t peers = 0;
};

}  // namespace kvxfer
