// libfabric NICs without engines. Their paths are joined by hand and polled one side at a time, so
// that a test can stop a write half-way.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "completion_queue.hpp"
#include "doubles/bare_path.hpp"
#include "fabric/nic/nic_domain.hpp"
#include "fabric/ofi/ofi_factory.hpp"
#include "memory_region.hpp"

namespace kvxfer::test {

// Options for `endpoints` NICs of the loopback device under libfabric's tcp provider.
EngineOptions ofi_options(const std::string& name, unsigned endpoints = 1);
// The same, with EFA's limits and disorder.
EngineOptions strict_ofi_options(const std::string& name, unsigned endpoints = 1);
// True if the case is skipped; it then prints why.
bool ofi_skipped();
std::size_t count_other_than(const RegionPtr& region, std::byte value);

class OfiBench final : private NicEvents {
 public:
  OfiBench(EngineOptions options, ofi::OfiFactory::Overrides overrides);

  // The last NIC is the reader's; all others are writers'.
  std::uint32_t reader() const { return static_cast<std::uint32_t>(nics_.size()) - 1; }
  struct Joined {
    BarePath writer;
    BarePath reader;  // destroyed first, which fences the writer while it still exists
  };
  // Joins writer `nic`, which is peer `nic` of the reader.
  Joined join(std::uint32_t nic);
  RegionPtr region(std::size_t bytes);
  RemoteKey key_for(std::uint32_t writer, const RegionPtr& region);
  // Posts `pieces` of the source, as many as there is room for.
  OperationPtr post(NicPath& path, const RegionPtr& source, const RemoteKey& destination,
                    std::size_t pieces, std::uint32_t piece_bytes, std::optional<Imm> imm);
  // Polls all NICs until the condition is true; fails the test at a deadline.
  void until(const std::function<bool()>& so);
  // Polls this NIC alone, as if the processes of the others were frozen.
  void until_polled(std::uint32_t nic, const std::function<bool()>& so);
  // Lets everything arrive that can.
  void settle();

  std::unique_ptr<CompletionQueue> completions;
  ImmCounters counters;
  EngineStats stats;
  std::map<const Path*, Error> lost;

 private:
  void poll_until(const std::function<bool()>& so, std::uint32_t first, std::uint32_t end);
  void on_finished(const OperationPtr& operation, const WriteRange& writes,
                   const Error& error) override;
  void on_lost(Path& path, Error error) override { lost[&path] = std::move(error); }
  void on_nic_state(NicDomain&) override {}
  void on_credit_due(NicPath&) override {}
  void on_refused(NicPath&, Imm) override {}
  void on_window(NicPath&, std::uint64_t) override {}

  EngineOptions options_;
  Poller poller_;
  RegionTable regions_;
  std::uint64_t activity_ = 0;
  cuda::Gpus gpus_;
  std::vector<std::unique_ptr<NicDomain>> nics_;
  Background background_{poller_};
  PathId last_path_ = 0;
};

}  // namespace kvxfer::test
