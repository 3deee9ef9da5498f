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
  // What the domains are opened with, and use until the engine is closed.
  struct Context {
    const EngineOptions& options;
    const EngineId& engine;
    Poller& poller;
    Background& background;
    cuda::Gpus& gpus;
    local::LentMemory& lent;
    ReceiveContext receive_context;
    CompletionQueue& completions;  // for notices
    NicEvents& events;
    local::LocalEvents& local_events;
  };

  // Those that the options ask for and this host has. Writes into `introduction` what peers are to
  // know of them.
  Result<void> open(const Context& context, Introduction& introduction);

  // Any thread: the fabrics in use, in the order in which they are preferred.
  const std::vector<std::string>& names() const { return names_; }
  // Null where it is not used.
  local::LocalDomain* local() const { return local_.get(); }
  // By their numbers.
  const std::vector<std::unique_ptr<NicDomain>>& nics() const { return nics_; }
  const std::vector<std::unique_ptr<tcp::TcpDomain>>& lanes() const { return lanes_; }
  // Nothing is moved but by looking at sockets.
  bool only_sockets() const { return !local_ && nics_.empty(); }

  // First in a step: what lanes owe since the last one, so that it goes with what is posted
  // meanwhile.
  void send_owed();
  // After looking at sockets: everything else.
  void poll();
  bool prepare_sleep();
  void finish_sleep();
  void forget_source(const MemoryRegion& region);
  // Engines of this host cannot connect any more.
  void close_local();

  // Any thread: registers it with every NIC that reaches it. Fails where one does not, if NICs are
  // required or there is no other way.
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
  std::vector<Domain*> all_;  // in the order in which they are asked before a sleep
  std::vector<std::string> names_;
  std::mutex mutex_;
  std::set<std::string> told_;  // why memory is not registered; guarded by mutex_
};

}  // namespace kvxfer
