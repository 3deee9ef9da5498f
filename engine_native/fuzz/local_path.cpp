// The same-host fabric: the peer writes every byte of both rings as it likes, and sends region
// messages with and without descriptors; in host memory and in a GPU's.
#include "fabric/local/local_path.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "fabric/local/gpu_probe.hpp"
#include "fabric/local/region_message.hpp"
#include "fabric/local/unix_socket.hpp"
#include "targets.hpp"
#include "world.hpp"

namespace kvxfer::fuzz {
namespace {

constexpr std::size_t kShared = 8192;
constexpr std::size_t kGpuFile = std::size_t{2} << 20;
constexpr std::uint64_t kSeed = 42;  // seed of a probe that reads right

UniqueFd shared_memory(std::size_t size, bool sealed) {
  UniqueFd memfd(::memfd_create("fuzzed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  require(memfd && ::ftruncate(memfd.get(), static_cast<off_t>(size)) == 0,
          "the system has memory");
  if (sealed) ::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK);
  return memfd;
}

template <class T>
T opened(Result<T> result) {
  require(static_cast<bool>(result), "rings and paths can be opened");
  return std::move(*result);
}

// Resets one of two rings that serve all runs, because making a ring takes longer than anything
// else.
local::SharedRing& fresh_ring(std::size_t number) {
  static std::array<local::SharedRing, 2> rings{opened(local::SharedRing::create()),
                                                opened(local::SharedRing::create())};
  local::SharedRing& ring = rings[number];
  ring->produced = 0;
  ring->consumed = 0;
  ring->producer_sleeps_until = local::RingMemory::kAwake;
  ring->consumer_sleeps = 0;
  ring->revoked = 0;
  std::memset(static_cast<void*>(ring->slots), 0, sizeof ring->slots);
  return ring;
}

local::SharedRing mapped_again(const local::SharedRing& ring) {
  return opened(local::SharedRing::map(UniqueFd(::dup(ring.memfd()))));
}

class Local {
 public:
  explicit Local(World::Place place) : world_(place), theirs_(fresh_ring(0)), ours_(fresh_ring(1)) {
    int ends[2];
    require(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
            "the system has sockets");
    peer_ = UniqueFd(ends[1]);
    path_ = opened(local::LocalPath::open(
        {.socket = UniqueFd(ends[0]),
         .out = mapped_again(ours_),
         .in = mapped_again(theirs_),
         .wake_peer = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
         .pid = ::getpid(),
         .pidfd = local::open_pidfd(::getpid()),
         .peer_reads_us = true,
         .we_read_peer = true},
        {kPeer, "peer", false, true}, world_.poller, world_.receive_context(), books_,
        {world_.gpus(), background_, lent_, [](const std::string&) {}}));
  }

  void act(Input& input) {
    switch (input.below(14)) {
      case 0:
      case 1:
        return put_batch(input);
      case 2:
        theirs_->produced.store(input.flag() ? input.get<std::uint64_t>()
                                             : produced_ + input.byte());
        return;
      case 3:
        return put_slot(input);
      case 4:
        return share(input);
      case 5: {
        const std::uint8_t which = input.byte();
        if (which >= 0xf0) {
          using Kind = local::RegionMessage::Kind;
          return share_gpu(input, which % 4u, which & 8 ? Kind::probe_gpu : Kind::share_gpu);
        }
        if (which >= 0xe0) return answer_gpu(input);
        return say({.kind = local::RegionMessage::Kind::forget, .number = which % 4u}, {});
      }
      case 6:
        (void)local::send_message(peer_.get(), input.text(), {});
        return;
      case 7:
        return path_->poll();
      case 8:
        return step();
      case 9:
        if (path_->prepare_sleep()) path_->finish_sleep();
        return;
      case 10:
        return post(input);
      case 11:
        return acknowledge(input);
      case 12:
        return release();
      default:
        return rarely(input);
    }
  }

  void finish() {
    for (int i = 0; i < 2; ++i) {
      path_->poll();
      step();
    }
    release();
    path_->poll();
    path_.reset();
    step();
  }

 private:
  // Works until nothing is being opened, closed or copied.
  void step() {
    do {
      world_.poller.poll(0);
      world_.gpus().poll();
      background_.finish();
    } while (!background_.idle() || world_.gpus().busy());
  }

  void release() {
    world_.release([this] { path_->revoke_counter(world_.granted_imm); });
  }

  void say(const local::RegionMessage& message, const std::vector<int>& fds) {
    (void)local::send_message(peer_.get(), message.bytes(), fds);
  }

  void share(Input& input) {
    static const UniqueFd sealed = shared_memory(kShared, true);
    static const UniqueFd loose = shared_memory(kShared, false);
    const local::RegionMessage message{.kind = local::RegionMessage::Kind::share,
                                       .number = input.byte() % 4u,
                                       .size = input.flag() ? kShared : input.number()};
    const std::vector<std::vector<int>> attached{
        {sealed.get()}, {sealed.get()}, {loose.get()}, {}, {sealed.get(), sealed.get()}};
    say(message, attached[input.below(attached.size())]);
  }

  // Sends a region or a probe with files of a GPU's memory, or without: then its address counts,
  // which is right within one process. Without a GPU it is refused. A probe may have the right
  // bytes.
  void share_gpu(Input& input, std::uint32_t number, local::RegionMessage::Kind kind) {
    static const UniqueFd file = shared_memory(kShared, false);
    local::GpuRegionMessage message{
        .head = {.kind = kind, .number = number, .size = input.number()},
        .offset = input.number(),
        .address = input.number(),
        .reader = input.byte(),
        .handle = {}};
    const std::size_t files = input.byte() % 4u;
    const std::size_t sizes = input.flag() ? files : input.byte() % 4u;
    if (world_.on_gpu()) {
      message.reader %= 2;
      message.address = Device::only().source->address();
      if (files == 0) message.head.size = Device::only().source->size();
    }
    std::string bytes(message.bytes());
    for (std::size_t i = 0; i < sizes; ++i) {
      const bool right = world_.on_gpu() && input.flag();
      const std::uint64_t size = right ? kGpuFile : input.number();
      bytes.append(reinterpret_cast<const char*>(&size), sizeof size);
    }
    int attached = file.get();
    if (world_.on_gpu()) {
      message.owner = Device::only().gpu->uuid();
      if (input.flag()) message.owner.bytes[0] ^= 1;
      message.seed = input.flag() ? kSeed : input.byte();
      attached = message.seed == kSeed ? probe_file() : gpu_file();
      bytes.replace(0, sizeof message, message.bytes());
    }
    (void)local::send_message(peer_.get(), bytes, std::vector<int>(files, attached));
    background_.finish();
  }

  static int probe_file() {
    static const auto probe = opened(local::offer_probe(*Device::only().gpu, kSeed));
    return probe.parts.front().file.get();
  }

  // Returns a file like those by which the double exports memory of cuMemCreate.
  static int gpu_file() {
    static const UniqueFd file = [] {
      UniqueFd memfd(::memfd_create("cuda-double-0", MFD_CLOEXEC));
      require(memfd && ::ftruncate(memfd.get(), kGpuFile) == 0, "the system has memory");
      return memfd;
    }();
    return file.get();
  }

  // Answers for a region of a GPU that we share, or for none.
  void answer_gpu(Input& input) {
    using Kind = local::RegionMessage::Kind;
    const Kind kind = std::array{Kind::refused, Kind::opened, Kind::untried}[input.below(3)];
    const std::string_view reason = kind == Kind::refused ? input.text() : "";
    const local::RegionMessage answer{
        .kind = kind, .number = input.byte() % 4u, .size = reason.size()};
    (void)local::send_message(peer_.get(), std::string(answer.bytes()) + std::string(reason), {});
  }

  void put_batch(Input& input) {
    local::BatchHead head{.key = world_.key(input)};
    head.has_imm = input.byte() & 1;
    if (head.has_imm) head.imm = world_.imm(input);
    head.from_region = input.byte() & 1;
    head.region = input.byte() % 4u;
    const std::size_t count = input.byte() % 8u;
    head.count =
        input.byte() == 0xff ? input.get<std::uint32_t>() : static_cast<std::uint32_t>(count);
    theirs_.slot(produced_).head = head;
    for (std::size_t i = 1; i <= count; ++i) {
      local::WriteEntry entry{};
      entry.source = head.from_region ? input.number() : address(input);
      entry.destination = input.flag() ? input.number() : input.get<std::uint16_t>();
      entry.length = input.flag() ? input.byte() : input.get<std::uint16_t>();
      if (entry.length == 0xffff) entry.length = input.get<std::uint32_t>();
      theirs_.slot(produced_ + i).write = entry;
    }
    produced_ += 1 + count;
    theirs_->produced.store(produced_);
  }

  // Returns an address in the peer's process, which is this one.
  std::uint64_t address(Input& input) {
    if (input.byte() == 0xff) return input.get<std::uint64_t>();
    return reinterpret_cast<std::uint64_t>(source_.data()) + input.byte();
  }

  void put_slot(Input& input) {
    local::Slot slot;
    const std::uint64_t position = input.number();
    slot.head = input.get<local::BatchHead>();
    theirs_.slot(position) = slot;
  }

  void post(Input& input) {
    static const RegionPtr shareable = opened(MemoryRegion::allocate({}, 4096));
    const std::size_t which = input.below(3);
    RegionPtr source = which == 0 ? shareable : nullptr;
    if (which == 1) source = opened(MemoryRegion::wrap({}, source_.data(), source_.size()));
    if (which == 1 && world_.on_gpu()) source = Device::only().source;
    const std::uint64_t key = world_.key(input);
    const auto operation = world_.operation(input, std::move(source), key);
    if (world_.on_gpu() && input.flag()) operation->destination_gpu = input.byte() % 2;
    if (!path_->has_room(*operation, true)) return;
    operations_.push_back(operation);
    operation->took(path_->post(operation, operation->next()));
  }

  // Acts as the consumer of our ring.
  void acknowledge(Input& input) {
    ours_.slot(input.byte()).head.status = static_cast<std::uint16_t>(input.number());
    ours_->consumed.store(input.number());
    ours_->consumer_sleeps.store(input.byte());
  }

  void rarely(Input& input) {
    switch (input.below(4)) {
      case 0:
        theirs_->revoked.store(input.byte());
        return;
      case 1:
        theirs_->producer_sleeps_until.store(input.number());
        return;
      case 2:
        return world_.deregister([this] { path_->revoke_region(world_.open->key()); });
      default:
        peer_.reset();
    }
  }

  World world_;
  Books books_;
  Background background_{world_.poller};
  local::LentMemory lent_{world_.poller};
  std::array<std::byte, 8192> source_{};
  std::vector<OperationPtr> operations_;
  UniqueFd peer_;
  local::SharedRing& theirs_;
  local::SharedRing& ours_;
  std::uint64_t produced_ = 0;
  std::unique_ptr<local::LocalPath> path_;
};

void run_on_path(World::Place place, std::string_view bytes) {
  Input input(bytes);
  Local local(place);
  while (!input.empty()) local.act(input);
  local.finish();
}

}  // namespace

void local_path(std::string_view bytes) { run_on_path(World::Place::host, bytes); }
void local_path_gpu(std::string_view bytes) { run_on_path(World::Place::gpu, bytes); }

}  // namespace kvxfer::fuzz
