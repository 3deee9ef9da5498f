// One queue pair of a NIC, to one NIC of a peer. Engine thread only.
#pragma once

#include <memory>
#include <string>

#include "fabric/nic/nic_domain.hpp"
#include "fabric/verbs/address_lookups.hpp"
#include "fabric/verbs/async_events.hpp"
#include "fabric/verbs/nic_queues.hpp"
#include "fabric/verbs/path_windows.hpp"
#include "fabric/verbs/queue_pair.hpp"

namespace kvxfer::verbs {

// What the paths of one NIC share; outlives them.
struct VerbsNic {
  std::shared_ptr<const VerbsDevice> device;
  NicContext context;
  // More are made when the others are full of paths.
  std::vector<std::unique_ptr<NicQueues>> queues;
  std::unique_ptr<AsyncEvents> events;
  Port port;  // as it is now
  NicLoad load;
  bool broken = false;  // for good
  AddressLookups lookups;
};

class VerbsPath final : public NicPath {
 public:
  static Result<std::unique_ptr<NicPath>> open(NicPathIdentity identity, VerbsNic& nic);
  ~VerbsPath() override;

  std::string_view fabric() const override { return "verbs"; }
  std::string endpoint() const override { return ours_.encode(); }
  Result<void> connect(std::string_view endpoint) override;
  bool has_room(bool counted) const override {
    return sends_left_ > 0 && NicPath::has_room(counted);
  }
  std::size_t post(const OperationPtr& operation, const WriteRange& writes) override;
  void shut() override;
  bool open_window(const MemoryRegion& grant) override;
  void close_window(std::uint64_t grant) override {
    windows_.close(grant);
    post_windows();
  }
  bool has_windows_of(const MemoryRegion& region) const override;
  std::optional<RemoteKey> window(std::uint64_t grant) const override {
    return windows_.find(grant);
  }

  // --- from the NIC's queues and events
  void on_sent(std::uint64_t request);
  void on_immediates(Imm imm, std::uint64_t writes, std::uint64_t bytes) {
    count_immediates(imm, writes, bytes);
  }
  void on_failed(const ibv_wc& completion);
  void on_failed(const std::string& cause);
  void on_nic_down(const std::string& why) { lose({Errc::nic_lost, why}); }

 private:
  VerbsPath(NicPathIdentity identity, NicQueues::Share share, std::shared_ptr<QueuePair> pair,
            VerbsNic& nic);
  void write_request(std::size_t at, const Operation& operation, const WireWrite& write,
                     const RemoteKey& key, bool counted);
  void post_windows();
  void stop();

  VerbsNic& nic_;
  NicQueues& queues_;
  PathShare share_;
  std::shared_ptr<QueuePair> pair_;  // null once shut
  Port port_;                        // as the peer was told
  PathEndpoint ours_;
  PathWindows windows_;
  std::uint32_t sends_left_;
  bool joining_ = false;  // a lookup still uses the queue pair
  bool stopping_ = false;
  bool stopped_ = false;  // every request that was posted has completed
};

}  // namespace kvxfer::verbs
