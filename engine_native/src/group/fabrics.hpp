// The domains of an engine, by fabric. Opened once; then the engine thread's, unless said
// otherwise.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "background.hpp"
#include "bootstrap/handshake.hpp"
#include "completion_queue.hpp"
#include "cuda/gpus.hpp"
#include "domain.hpp"
#include "fabric/local/lent_memory.hpp"
#include "fabric/local/local_domain.hpp"
#include "fabric/nic/nic_domain.hpp"
#include "fabric/tcp/tcp_domain.hpp"
#include "kvxfer/types.hpp"
#include "poller.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class Fabrics {
 public:
  // The context of the domains, used until the engine is closed.
  struct Context {
    const EngineOptions& options;
    const EngineId& engine;
    Poller& poller;
    Background& background;
    cuda::Gpus& gpus;
    local::LentMemory& lent;
    ReceiveContext receive_context;
    CompletionQueue& completions;  // takes notices
    NicEvents& events;
    local::LocalEvents& local_events;
  };

  // Opens the domains that the options ask for and this host has. Writes into `introduction` what
  // peers need to know of them.
  Result<void> open(const Context& context, Introduction& introduction);

  // Any thread: the fabrics in use, in the order in which they are preferred.
  const std::vector<std::string>& names() const { return names_; }
  // The local domain; null if it is not used.
  local::LocalDomain* local() const { return local_.get(); }
  // The NICs, by number.
  const std::vector<std::unique_ptr<NicDomain>>& nics() const { return nics_; }
  const std::vector<std::unique_ptr<tcp::TcpDomain>>& lanes() const { return lanes_; }
  // True if only sockets move data.
  bool only_sockets() const { return !local_ && nics_.empty(); }

  // Called first in a step: sends what lanes owe, so that it goes with what is posted meanwhile.
  void send_owed();
  // Called after sockets were polled: polls everything else.
  void poll();
  bool prepare_sleep();
  void finish_sleep();
  void forget_source(const MemoryRegion& region);
  // Closes the local fabric: engines of this host can no longer connect.
  void close_local();

  // Any thread: registers the region with every NIC that reaches it. Fails if a NIC that is up does
  // not, and NICs are required or there is no other way.
  Result<void> register_memory(MemoryRegion& region, bool require_nics,
                               CompletionQueue& completions);

 private:
  Result<void> open_local(const Context& context, Introduction& introduction);
  Result<void> open_nics(const Context& context, Introduction& introduction);
  void tell_once(std::string text, CompletionQueue& completions);

  [[no_unique_address]] ThreadOwner thread_;
  std::unique_ptr<local::LocalDomain> local_;
  std::vector<std::unique_ptr<NicDomain>> nics_;
  std::vector<std::unique_ptr<tcp::TcpDomain>> lanes_;
  std::vector<Domain*> all_;  // in the order of prepare_sleep()
  std::vector<std::string> names_;
  std::mutex mutex_;
  std::set<std::string> told_;  // notices on memory that is not registered; guarded by mutex_
};

}  // namespace kvxfer
