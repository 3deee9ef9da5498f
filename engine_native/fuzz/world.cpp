#include "world.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace kvxfer::fuzz {
namespace {

template <class T>
T taken(Result<T> result) {
  require(static_cast<bool>(result), "the system has descriptors and memory");
  return std::move(*result);
}

// Not closed at exit, because the double may be gone then.
Device* device = nullptr;

// Returns the number of allocations and mappings that the double has.
std::size_t mapped() {
  void* const library = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  require(library != nullptr, "the driver is loaded");
  const auto live = reinterpret_cast<std::size_t (*)()>(::dlsym(library, "cuda_double_live"));
  require(live != nullptr, "the driver is the double");
  const std::size_t count = live();
  ::dlclose(library);
  return count;
}

}  // namespace

Device& Device::only() {
  if (!device) {
    device = new Device;
    device->gpu = taken(device->gpus.open(0));
    device->memory = taken(MemoryRegion::allocate_on({}, device->gpu, 1 << 15));
    device->source = taken(MemoryRegion::allocate_on({}, device->gpu, 1 << 13));
  }
  return *device;
}

void Device::close() { delete std::exchange(device, nullptr); }

World::World(Place place)
    : completions(taken(CompletionQueue::create())),
      counters(std::make_unique<ImmCounters>(*completions)),
      poller(taken(Poller::create())),
      place_(place),
      on_host_(kAll, kUntouched),
      memory_(on_gpu() ? Device::only().memory
                       : taken(MemoryRegion::wrap({}, on_host_.data(), kAll))) {
  if (on_gpu()) {
    require(static_cast<bool>(Device::only().gpu->write(memory_->address(), on_host_)),
            "what copies reach is mapped");
    mapped_ = mapped();
  }
  open = wrap(at(0), kRegion);
  pool_ = wrap(at(1), kStep + kRegion);
  open_imm = taken(counters->allocate());
  granted_imm = taken(counters->allocate(kPeer));
  stranger_imm = taken(counters->allocate(kStranger));
  granted = MemoryRegion::grant({}, {pool_, 0, kRegion}, granted_imm, kPeer);
  of_stranger = MemoryRegion::grant({}, {pool_, kStep, kRegion}, stranger_imm, kStranger);
  for (const RegionPtr& region : {open, granted, of_stranger}) regions.insert(region);
}

World::~World() {
  check();
  require(!on_gpu() || mapped() == mapped_, "no memory of a peer's GPU stays mapped");
}

RegionPtr World::wrap(std::byte* address, std::size_t size) const {
  return taken(MemoryRegion::wrap({}, address, size, memory_->gpu()));
}

void World::wait_for_copies() {
  while (gpus().busy()) {
    gpus().poll();
    std::this_thread::yield();
  }
}

World::Bytes World::all() const {
  if (!on_gpu()) return on_host_;
  Bytes bytes(kAll);
  require(static_cast<bool>(memory_->gpu()->read(memory_->address(), bytes)),
          "what copies reach is mapped");
  return bytes;
}

std::uint64_t World::key(Input& input) const {
  switch (input.below(4)) {
    case 0:
      return open->key();
    case 1:
      return granted->key();
    case 2:
      return of_stranger->key();
    default:
      return input.number();
  }
}

Imm World::imm(Input& input) const {
  switch (input.below(4)) {
    case 0:
      return open_imm;
    case 1:
      return granted_imm;
    case 2:
      return stranger_imm;
    default:
      return static_cast<Imm>(input.number());
  }
}

OperationPtr World::operation(Input& input, RegionPtr source, std::uint64_t key) const {
  static OperationId last = 0;
  const std::size_t writes = input.below(12) + 1;
  const std::uint32_t length = source ? input.byte() : 0;
  auto submission = std::make_shared<Submission>();
  const OperationPtr made(submission, submission->parts.emplace_back());
  submission->id = ++last;
  made->peer = kPeer;
  made->source = std::move(source);
  made->destination_key = key;
  made->destination_length = writes * length;
  if (input.flag()) made->imm = imm(input);
  for (std::size_t i = 0; i < writes; ++i) submission->writes.push_back({0, i * length, length});
  made->writes = submission->writes;
  made->bytes = made->destination_length;
  made->deadline_ns = UINT64_MAX;
  return made;
}

void World::release(const std::function<void()>& tell) {
  counters->release(granted_imm);
  regions.erase(granted->key());
  tell();
  wait_for_copies();
  if (!released_) released_ = all();
}

void World::deregister(const std::function<void()>& tell) {
  regions.erase(open->key());
  tell();
  wait_for_copies();
  if (!deregistered_) deregistered_ = all();
}

void World::check() const {
  const Bytes now = all();
  const auto untouched = [&](std::size_t first, std::size_t size) {
    return std::ranges::all_of(std::span(now).subspan(first, size),
                               [](std::byte byte) { return byte == kUntouched; });
  };
  const auto same = [&](const std::optional<Bytes>& then, std::size_t region) {
    return !then || std::ranges::equal(part(*then, region), part(now, region));
  };
  for (std::size_t region = 0; region < 4; ++region) {
    require(untouched(region * kStep, kGuard), "nothing is written outside of regions");
  }
  require(untouched(2 * kStep + kGuard, kRegion), "nothing is written to another peer's grant");
  require(same(released_, 1), "nothing is written to a grant whose counter was released");
  require(same(deregistered_, 0), "nothing is written to a region that was deregistered");
  require(counters->value(stranger_imm) == 0, "another peer's counter does not move");
  require(stats.bytes_received <= stats.writes_received * kRegion, "what is counted fits");
}

void Books::on_finished(const OperationPtr& operation, const WriteRange& writes,
                        const Error& error) {
  require(writes.count <= operation->outstanding, "no write is finished twice");
  operation->finish(writes, error.code == Errc::ok);
  if (error.code != Errc::ok) operation->fail(error.code, error.text);
}

}  // namespace kvxfer::fuzz
