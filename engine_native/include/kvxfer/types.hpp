// Plain data types of the engine's interface.
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
inline constexpr std::size_t kMaxNics = 64;  // per engine

// The identity of one start of an engine: 16 random bytes, so a restarted engine has another.
struct EngineId {
  std::array<std::uint8_t, 16> bytes{};
  bool operator==(const EngineId& other) const {
    return std::memcmp(bytes.data(), other.bytes.data(), sizeof bytes) == 0;  // inlined
  }
  // True if all bytes are zero. As a target, that is any engine that listens at the address and
  // knows the cluster key.
  bool any() const { return *this == EngineId{}; }
  std::string hex() const;
  static Result<EngineId> from_hex(std::string_view text);
};

// The address at which an engine listens. Text form: kvx://HOST:PORT/ENGINE_ID
struct EngineAddress {
  std::string host;
  std::uint16_t port = 0;
  EngineId engine;
  std::string text() const;
  static Result<EngineAddress> parse(std::string_view text);
};

// The use of a fabric that needs hardware.
enum class FabricUse : std::uint8_t {
  never,
  if_available,  // used with peers that have it, if this host has its library and a NIC
  required,      // creating the engine fails if this host lacks something it needs
};

// A NIC of an engine, as its peers see it. NICs are numbered from 0 within an engine: verbs first.
struct NicInfo {
  std::string name;     // the device's: mlx5_0, rxe0, rdmap0s6
  std::string network;  // NICs reach each other if this is equal: roce, infiniband, ofi-efa
  std::uint64_t bits_per_second = 0;
  bool operator==(const NicInfo&) const = default;
};

class MemoryRegion;

// A factory of NICs of a kind that the engine does not have: see src/fabric/nic/nic_domain.hpp.
class NicFactory;

// Options that few engines set.
struct EngineTuning {
  unsigned lanes = 2;                                // tcp domains, each one connection per peer
  std::size_t window_bytes = std::size_t{16} << 20;  // unacknowledged bytes per peer over tcp
  Duration heartbeat_interval = std::chrono::milliseconds(100);
  Duration path_timeout = std::chrono::seconds(1);  // a NIC's path that delivers nothing is lost
  Duration spin = std::chrono::microseconds(200);   // busy polling after the last progress
  int service_level = 0;                            // verbs packets: the priority on RoCE
  unsigned path_mtu = 0;                            // bytes, at most the port's; 0: the port's
  bool memory_windows = true;                       // verbs: NICs keep peers within their grants
  unsigned paths_per_nic_pair = 1;  // queue pairs, each a separate flow to ECMP and LAG
  unsigned ofi_endpoints = 1;       // per libfabric domain, each standing for a NIC
};

// The bounds of numbers are in src/engine_options.cpp.
struct EngineOptions {
  std::string cluster_key;         // shared by all engines that may talk; at least 16 bytes
  std::string name;                // used in error texts; need not be unique
  std::string host = "127.0.0.1";  // numeric address to listen on
  std::string advertise;           // address to give to peers; empty: host
  std::uint16_t port = 0;          // 0: any free port
  bool local = true;               // use the local fabric with peers on this host
  bool tcp = true;                 // use the tcp fabric
  FabricUse verbs = FabricUse::never;
  FabricUse ofi = FabricUse::never;
  std::vector<std::string> nics;     // NICs to use: DEVICE or DEVICE:PORT; empty: all
  int traffic_class = 0;             // verbs packets: DSCP << 2 | ECN on RoCE
  int gid_index = -1;                // verbs ports; -1: chosen by address
  int pkey = 0;                      // InfiniBand partition; 0: the first with full membership
  std::string ofi_provider = "efa";  // name in libfabric
  bool ofi_strict = false;           // impose EFA's limits and disorder on any provider; for tests
  bool thread = true;  // run an engine thread; false: the engine works in TransferEngine::poll()
  std::vector<unsigned> cpus;             // CPUs for the engine thread; empty: any
  std::shared_ptr<NicFactory> more_nics;  // for tests; null: none
  Duration peer_timeout = std::chrono::milliseconds(700);
  Duration operation_timeout = std::chrono::seconds(30);  // deadline of operations without one
  EngineTuning tuning;
};

// The place of memory, which decides how fabrics reach it.
enum class MemoryKind : std::uint8_t { host, cuda };

// The permission to write into a region. encode() gives kBytes opaque bytes, safe to pass on.
struct MrDescriptor {
  EngineId engine;
  std::uint64_t key = 0;
  std::uint64_t length = 0;
  Imm imm = 0;  // in a grant: the immediate that writes must carry
  MemoryKind kind = MemoryKind::host;
  std::uint8_t device = 0;  // cuda: the GPU's number in the process that registered the region

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

// A word of host memory, counted up to start transfers: see TransferEngine::watch_word.
struct WatchWord {
  alignas(64) std::atomic<std::uint64_t> value = 0;
};

// A condition that holds a write back until the word has reached this value.
struct WatchFor {
  std::shared_ptr<const WatchWord> word;  // null: no condition
  std::uint64_t value = 0;
};

// A watch word that streams of a GPU count up: see TransferEngine::stream_word.
class StreamWord {
 public:
  virtual ~StreamWord() = default;
  // Queues on a CUstream of the GPU's primary context: adds `by` to the word once all earlier work
  // of the stream has ended; in a captured stream, at each run of the graph. Until then the word
  // must not be destroyed or used on another stream.
  virtual Result<void> add_on(void* stream, std::uint64_t by) = 0;
  // Returns the word for WriteOptions::after.
  virtual std::shared_ptr<const WatchWord> word() const = 0;
};

// A wait that is queued on a stream of a GPU: see TransferEngine::wait_on_stream.
class StreamWait {
 public:
  virtual ~StreamWait() = default;
  // Returns false while the stream waits, and true once the counter has reached the total. Fails
  // with the reason if the wait ended otherwise: then the work behind it runs without the bytes.
  virtual Result<bool> reached() const = 0;
  // Returns the same for work of the GPU behind the wait: the lowest byte is 1 if the counter has
  // reached the total, and greater if the wait failed. The word is pinned host memory, at the
  // address by which the GPU knows it.
  virtual const std::atomic<std::uint64_t>& word() const = 0;
};

// A copy of a counter for work of a GPU: see TransferEngine::mirror_counter.
class CounterMirror {
 public:
  virtual ~CounterMirror() = default;
  // Returns the count from bit 8 on. The lowest byte is 0 while the counter is live, then greater.
  // The word is pinned host memory, at the address by which the GPU knows it.
  virtual const std::atomic<std::uint64_t>& word() const = 0;
};

struct WriteOptions {
  std::optional<Imm> imm;            // counts at the receiver: see Submitted
  Duration timeout{};                // 0: the engine's operation_timeout
  std::optional<std::uint32_t> nic;  // the only NIC to use: see TransferEngine::nics()
  WatchFor after{};
};

// A range of a registered region.
struct RegionRange {
  std::shared_ptr<MemoryRegion> region;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

// One write of TransferEngine::write_list, with its own regions.
struct ListedWrite {
  std::shared_ptr<MemoryRegion> source;
  MrDescriptor destination;
  SingleWrite write;
};

// A part of a scatter, for one peer.
struct ScatterPart {
  std::size_t member = 0;  // index in the group
  MrDescriptor destination;
  SingleWrite write;  // length 0: the immediate alone
};

// The count that a counter waits for.
enum class Expect : std::uint8_t { exactly, at_least };

// The result of submitting to one peer. If every network that both engines have keeps the order of
// writes, one immediate counts for a group of up to 32 writes.
struct Submitted {
  OperationId id = 0;
  std::uint64_t writes = 0;      // on the wire
  std::uint64_t immediates = 0;  // growth of the receiver's counter in all
  std::uint64_t bytes = 0;
};

// The result of submitting one operation to several peers.
struct Scattered {
  OperationId id = 0;
  std::uint64_t writes = 0;               // to all peers
  std::vector<std::uint64_t> immediates;  // growth of the counter, by part; barrier: by peer
  std::uint64_t bytes = 0;                // to all peers
};

// The failure of a part of an operation: its writes from one region to one region of one peer.
struct PartFailure {
  std::size_t part = 0;  // index, in the order of submission
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
  // The operation's id; the immediate for counter, arrival and released; for peer_up, 1 if the peer
  // has connected and 0 if this engine has.
  std::uint64_t id = 0;
  PeerId peer = 0;
  Errc code = Errc::ok;
  std::string text;                // error or notice; peer_up: the peer's name
  std::string data;                // message payload; peer_up: the peer's engine id (hex)
  std::string fabric;              // peer_up only
  std::uint64_t timestamp_ns = 0;  // CLOCK_MONOTONIC
  // write: the parts that failed; code, text and peer are those of the first.
  std::vector<PartFailure> failed;
};

// Counts of refusals, in all and by reason.
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
  std::uint64_t bytes_staged = 0;     // part of bytes_sent: from a GPU through host memory
  std::uint64_t bytes_received = 0;   // payload that the engine placed, not a NIC
  std::uint64_t writes_posted = 0;    // given to a path, repeats included
  std::uint64_t writes_sent = 0;      // delivered writes
  std::uint64_t writes_received = 0;  // over NICs: immediates, as it sees no more
  Refusals writes_refused;            // dropped: unknown region, out of bounds, no live counter
  Refusals handshakes_refused;        // refused connections: strangers, lanes, rendezvous
  Refusals peers_refused;             // peers lost to protocol-error or backpressure
  std::uint64_t peers = 0;
};

}  // namespace kvxfer
