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
  // domain.usable() has changed. Its paths were reported lost before, if it went down.
  virtual void on_nic_state(NicDomain& domain) = 0;
  // The peer may be told that path.consumed() has grown.
  virtual void on_credit_due(NicPath& path) = 0;
  // The peer wrote with an immediate that counts for nothing: its counter is not live, or another
  // writer's.
  virtual void on_refused(NicPath& path, Imm imm) = 0;
  // path.window(grant) is open; without a value the NIC has none left.
  virtual void on_window(NicPath& path, std::uint64_t grant) = 0;

 protected:
  ~NicEvents() = default;
};

class NicDomain : public Domain {
 public:
  virtual const NicInfo& info() const = 0;
  // The device works and its link is up.
  virtual bool usable() const = 0;
  // Each of its paths delivers writes, and their immediates, in the order in which they were
  // posted.
  virtual bool keeps_order() const = 0;
  // Whether a path that is shut still counts what had arrived and was not polled. Where it does
  // not, each end first waits for what the other knows to be delivered.
  virtual bool keeps_arrivals() const { return true; }
  // Whether it may be asked to register memory of GPUs.
  virtual bool knows_gpus() const { return false; }
  // Pins and registers memory for reading from and writing into. Any thread. Fails with
  // fabric-unavailable where the memory is a GPU's that the NIC does not reach.
  virtual Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion& region) = 0;
  // The longest part of registered memory, in bytes, that its paths can open, and close without the
  // peer's help. 0: none.
  virtual std::uint64_t max_window() const { return 0; }
  // One end of a path; it works once both ends are connected. `then`: now or later.
  using Opened = std::function<void(Result<std::unique_ptr<NicPath>>)>;
  virtual void open_path(NicPathIdentity identity, Opened then) = 0;
  void forget_source(const MemoryRegion&) override {}
};

// What a domain is made with, and uses until the engine is closed.
struct NicContext {
  const EngineOptions& options;
  Poller& poller;
  Background& background;
  cuda::Gpus& gpus;
  ReceiveContext receive_context;
  NicEvents& events;
  std::uint32_t first_number;  // of the NICs that the factory makes
};

struct OpenedNics {
  std::vector<std::unique_ptr<NicDomain>> nics;
  // What EngineOptions::nics may choose from on this host, whether or not it could be opened.
  std::vector<std::string> names;
  // Why NICs that are there are not used.
  std::vector<std::string> notices;
};

class NicFactory {
 public:
  virtual ~NicFactory() = default;
  virtual Result<OpenedNics> open(const NicContext& context) = 0;
};

}  // namespace kvxfer
