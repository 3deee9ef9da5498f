#include "fabric/null/null_nic.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>

#include "bootstrap/bytes.hpp"
#include "error_text.hpp"
#include "random.hpp"

namespace kvxfer::null {
namespace {

// The rounds in which the thread finds nothing before it rests between rounds.
constexpr unsigned kIdleLooks = 10'000;
constexpr std::chrono::microseconds kRest{50};

}  // namespace

// --- completions -----------------------------------------------------------------------------

Result<void> CompletionRing::open() {
  event_ = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (event_) return {};
  return Error{Errc::fabric_unavailable, "null: no eventfd: " + errno_text()};
}

void CompletionRing::push(std::uint64_t request, std::uint32_t path, Imm imm) {
  nic_thread_.check("CompletionRing");
  Completion& entry = entries_[written_ % kEntries];
  entry.request = request;
  entry.path = path;
  entry.imm = imm;
  entry.turn.store(turn_of(written_++), std::memory_order_release);
}

const Completion* CompletionRing::front() const {
  const Completion& entry = entries_[next_ % kEntries];
  return entry.turn.load(std::memory_order_acquire) == turn_of(next_) ? &entry : nullptr;
}

void CompletionRing::wake_if_armed() {
  if (written_ == read_.load(std::memory_order_acquire) || !armed_.exchange(false)) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto told = ::write(event_.get(), &one, sizeof one);
}

// --- requests --------------------------------------------------------------------------------

bool SendQueue::serve(std::uint32_t path, CompletionRing* peers, std::uint32_t peers_path) {
  nic_thread_.check("SendQueue");
  const std::uint64_t posted = doorbell_.load(std::memory_order_acquire);
  if (served_ == posted || !peers) return false;
  for (; served_ != posted && !peers->full() && !completions_.full(); ++served_) {
    const WorkRequest& request = requests_[served_ % kEntries];
    if (request.counted) peers->push(0, peers_path, request.imm);
    if (request.completes != 0) completions_.push(request.completes, path, 0);
  }
  return true;
}

// --- the thread ------------------------------------------------------------------------------

NullNics::NullNics() : thread_([this](const std::stop_token& stop) { run(stop); }) {
  random_bytes(&network_, sizeof network_);
}

void NullNics::add(CompletionRing& ring) {
  const std::lock_guard lock(mutex_);
  rings_.push_back(&ring);
}

void NullNics::remove(CompletionRing& ring) {
  const std::lock_guard lock(mutex_);
  std::erase(rings_, &ring);
}

std::uint32_t NullNics::add(SendQueue& queue, CompletionRing& ring) {
  const std::lock_guard lock(mutex_);
  paths_[++last_] = {.queue = &queue, .ring = &ring};
  return last_;
}

std::string NullNics::endpoint(std::uint32_t path) const {
  return ByteWriter().put(network_).put(path).take();
}

bool NullNics::join(std::uint32_t path, std::string_view endpoint) {
  ByteReader reader(endpoint);
  const auto network = reader.get<std::uint64_t>();
  const auto peers = reader.get<std::uint32_t>();
  if (!reader.finished() || network != network_) return false;
  const std::lock_guard lock(mutex_);
  paths_.at(path).peer = peers;
  return paths_.contains(peers);
}

void NullNics::remove(std::uint32_t path) {
  const std::lock_guard lock(mutex_);
  paths_.erase(path);
}

void NullNics::run(const std::stop_token& stop) {
  for (unsigned idle = 0; !stop.stop_requested();) {
    idle = serve_all() ? 0 : idle + 1;
    if (idle > kIdleLooks) std::this_thread::sleep_for(kRest);
  }
}

bool NullNics::serve_all() {
  const std::lock_guard lock(mutex_);
  bool served = false;
  for (auto& [number, path] : paths_) {
    const auto peer = paths_.find(path.peer);
    CompletionRing* const ring = peer == paths_.end() ? nullptr : peer->second.ring;
    served |= path.queue->serve(number, ring, path.peer);
  }
  for (CompletionRing* const ring : rings_) ring->wake_if_armed();
  return served;
}

}  // namespace kvxfer::null
