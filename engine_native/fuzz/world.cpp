#include "world.hpp"

#include <algorithm>

namespace kvxfer::fuzz {
namespace {

template <class T>
T taken(Result<T> result) {
  require(static_cast<bool>(result), "the system has descriptors and memory");
  return std::move(*result);
}

}  // namespace

World::World()
    : completions(taken(CompletionQueue::create())),
      counters(std::make_unique<ImmCounters>(*completions)),
      poller(taken(Poller::create())),
      memory_(3 * (kRegion + kGuard) + kGuard, kUntouched) {
  const EngineId engine{};
  open = taken(MemoryRegion::wrap(engine, at(0), kRegion));
  pool_ = taken(MemoryRegion::wrap(engine, at(1), 2 * kRegion + kGuard));
  open_imm = taken(counters->allocate());
  granted_imm = taken(counters->allocate(kPeer));
  stranger_imm = taken(counters->allocate(kStranger));
  granted = MemoryRegion::grant(engine, {pool_, 0, kRegion}, granted_imm, kPeer);
  of_stranger =
      MemoryRegion::grant(engine, {pool_, kRegion + kGuard, kRegion}, stranger_imm, kStranger);
  for (const RegionPtr& region : {open, granted, of_stranger}) regions.insert(region);
}

World::~World() { check(); }

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

void World::release() {
  if (released_) return;
  counters->release(granted_imm);
  regions.erase(granted->key());
  released_ = copy_of(*granted);
}

void World::deregister() {
  if (deregistered_) return;
  regions.erase(open->key());
  deregistered_ = copy_of(*open);
}

void World::check() const {
  const auto untouched = [this](std::size_t first, std::size_t size) {
    const auto begin = memory_.begin() + static_cast<std::ptrdiff_t>(first);
    return std::all_of(begin, begin + static_cast<std::ptrdiff_t>(size),
                       [](std::byte byte) { return byte == kUntouched; });
  };
  constexpr std::size_t kStep = kRegion + kGuard;
  for (std::size_t region = 0; region < 4; ++region) {
    require(untouched(region * kStep, kGuard), "nothing is written outside of regions");
  }
  require(untouched(2 * kStep + kGuard, kRegion), "nothing is written to another peer's grant");
  require(!released_ || *released_ == copy_of(*granted),
          "nothing is written to a grant whose counter was released");
  require(!deregistered_ || *deregistered_ == copy_of(*open),
          "nothing is written to a region that was deregistered");
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
