#include "scripted_nic.hpp"

#include <algorithm>

#include "bootstrap/bytes.hpp"
#include "input.hpp"
#ifdef KVXFER_HAVE_VERBS
#include "fabric/verbs/path_endpoint.hpp"
#endif

namespace kvxfer::fuzz {
namespace {

class ScriptedRegistration final : public NicRegistration {
 public:
  Result<RemoteKey> share(PeerId) override {
    return RemoteKey{.address = 1, .rkey = 2, .valid = true};
  }
  void unshare(PeerId) override {}
  Result<void> close() override { return {}; }
};

}  // namespace

ScriptedNic::ScriptedNic(std::string name, bool windows, ReceiveContext receive_context,
                         NicEvents& events)
    : info_{.name = std::move(name), .network = "simulated", .bits_per_second = 1'000'000'000},
      windows_(windows),
      receive_context_(receive_context),
      events_(events) {}

Result<std::shared_ptr<NicRegistration>> ScriptedNic::register_memory(const MemoryRegion&) {
  return std::shared_ptr<NicRegistration>(std::make_shared<ScriptedRegistration>());
}

void ScriptedNic::open_path(NicPathIdentity identity, Opened then) {
  if (refuses) return then(Error{Errc::out_of_memory, "no queue pair is left"});
  soon([this, identity = std::move(identity), then = std::move(then)] {
    then(std::unique_ptr<NicPath>(std::make_unique<ScriptedPath>(identity, *this)));
  });
}

void ScriptedNic::soon(std::function<void()> then) {
  if (!slow) return then();
  later_.push_back(std::move(then));
}

void ScriptedNic::catch_up() {
  while (!later_.empty()) {
    for (const auto& then : std::exchange(later_, {})) then();
  }
}

ScriptedPath::ScriptedPath(NicPathIdentity identity, ScriptedNic& nic)
    : NicPath(std::move(identity), 16, nic.load_, nic.receive_context_, nic.events_), nic_(nic) {
  nic_.paths.push_back(this);
}

ScriptedPath::~ScriptedPath() { std::erase(nic_.paths, this); }

std::string ScriptedPath::endpoint() const {
#ifdef KVXFER_HAVE_VERBS
  return verbs::PathEndpoint{.queue_pair = identity_.id, .imm_window = 16, .mtu = 3}.encode();
#else
  return ByteWriter().put(std::uint32_t{16}).take();
#endif
}

void ScriptedPath::connect(std::string_view endpoint, Connected then) {
#ifdef KVXFER_HAVE_VERBS
  const auto theirs = verbs::PathEndpoint::decode(endpoint);
  if (!theirs) return then(Error{Errc::protocol_error, "no endpoint"});
  set_peer_imm_window(theirs->imm_window);
#else
  set_peer_imm_window(ByteReader(endpoint).get<std::uint32_t>());
#endif
  then_connected_ = std::move(then);
  nic_.soon([this, alive = std::weak_ptr(alive_)] {
    if (!alive.expired() && then_connected_) std::exchange(then_connected_, nullptr)({});
  });
}

void ScriptedPath::shut(std::function<void()> then) {
  require(!shut_, "a path is shut once");
  shut_ = true;
  then_connected_ = nullptr;
  nic_.soon(std::move(then));
}

std::size_t ScriptedPath::post(const OperationPtr& operation, const WriteRange& writes) {
  require(is_open() && !sealed() && !shut_, "nothing is posted on a path that is not open");
  const std::size_t count = batch_limit(operation, writes, 4);
  for (std::size_t i = 0; i < count; ++i) {
    const WireWrite& write = operation->writes[writes.first + i];
    if (write.length > 0) (void)remote_key(*operation);
    add_batch(operation, {writes.first + i, 1, writes.counted}, write.length);
  }
  return count;
}

bool ScriptedPath::open_window(const MemoryRegion& grant) {
  if (!nic_.windows_) return false;
  windows_.try_emplace(grant.key());
  return true;
}

std::optional<RemoteKey> ScriptedPath::window(std::uint64_t grant) const {
  const auto found = windows_.find(grant);
  if (found == windows_.end() || !found->second.valid) return std::nullopt;
  return found->second;
}

void ScriptedPath::open_windows() {
  if (lost() || shut_) return;
  for (auto& [grant, window] : windows_) {
    if (window.valid) continue;
    window = {.address = 1, .rkey = 2, .valid = true};
    nic_.events_.on_window(*this, grant);
  }
}

}  // namespace kvxfer::fuzz
