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

Result<std::unique_ptr<NicPath>> ScriptedNic::open_path(NicPathIdentity identity) {
  if (refuses) return Error{Errc::out_of_memory, "no queue pair is left"};
  return std::unique_ptr<NicPath>(std::make_unique<ScriptedPath>(std::move(identity), *this));
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

Result<void> ScriptedPath::connect(std::string_view endpoint) {
#ifdef KVXFER_HAVE_VERBS
  const auto theirs = verbs::PathEndpoint::decode(endpoint);
  if (!theirs) return Error{Errc::protocol_error, "no endpoint"};
  set_peer_imm_window(theirs->imm_window);
#else
  set_peer_imm_window(ByteReader(endpoint).get<std::uint32_t>());
#endif
  return {};
}

std::size_t ScriptedPath::post(const OperationPtr& operation, const WriteRange& writes) {
  require(is_open() && !shut_, "nothing is posted on a path that is not open");
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
