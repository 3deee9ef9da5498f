// A domain whose NIC places the bytes: verbs, libfabric. One per NIC.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "background.hpp"
#include "cuda/gpus.hpp"
#include "domain.hpp"
#include "fabric/nic/nic_path.hpp"
#include "fabric/nic/nic_registration.hpp"
#include "poller.hpp"

namespace kvxfer {

class NicDomain;

class NicEvents : public PathEvents {
 public:
  // Called when domain.usable() has changed. If it went down, its paths were reported lost before.
  virtual void on_nic_state(NicDomain& domain) = 0;
  // Called when the peer may be told that path.consumed() has grown.
  virtual void on_credit_due(NicPath& path) = 0;
  // Called when the peer wrote with an immediate that counts for nothing: its counter is not live,
  // or is another writer's.
  virtual void on_refused(NicPath& path, Imm imm) = 0;
  // Called when path.window(grant) is open, or has no value because the NIC has no window left.
  virtual void on_window(NicPath& path, std::uint64_t grant) = 0;

 protected:
  ~NicEvents() = default;
};

class NicDomain : public Domain {
 public:
  virtual const NicInfo& info() const = 0;
  // True if the device works and its link is up.
  virtual bool usable() const = 0;
  // True if each of its paths delivers writes, and their immediates, in the order in which they
  // were posted.
  virtual bool keeps_order() const = 0;
  // True if a path that is shut still counts writes that had arrived but were not polled. If not,
  // each end first waits for the writes that the other knows to be delivered.
  virtual bool keeps_arrivals() const { return true; }
  // True if it can be asked to register memory of GPUs.
  virtual bool knows_gpus() const { return false; }
  // Pins and registers memory as source and destination. Any thread. Fails with fabric-unavailable
  // if the memory is on a GPU that the NIC does not reach.
  virtual Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion& region) = 0;
  // Returns the longest part of registered memory, in bytes, that its paths can open, and close
  // without the peer's help; 0 if they cannot.
  virtual std::uint64_t max_window() const { return 0; }
  // Opens one end of a path, which works once both ends are connected. Calls `then` now or later.
  using Opened = std::function<void(Result<std::unique_ptr<NicPath>>)>;
  virtual void open_path(NicPathIdentity identity, Opened then) = 0;
  void forget_source(const MemoryRegion&) override {}
};

// The context of a domain, used until the engine is closed.
struct NicContext {
  const EngineOptions& options;
  Poller& poller;
  Background& background;
  cuda::Gpus& gpus;
  ReceiveContext receive_context;
  NicEvents& events;
  std::uint32_t first_number;  // number of the first NIC that the factory makes
};

struct OpenedNics {
  std::vector<std::unique_ptr<NicDomain>> nics;
  // The names that EngineOptions::nics may list on this host, whether or not the NIC could be
  // opened.
  std::vector<std::string> names;
  // The reasons why NICs of this host are not used.
  std::vector<std::string> notices;
};

class NicFactory {
 public:
  virtual ~NicFactory() = default;
  virtual Result<OpenedNics> open(const NicContext& context) = 0;
};

}  // namespace kvxfer
