// RDMA NICs without engines. Their paths are joined by hand, so that a test can do to them what no
// engine would.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "completion_queue.hpp"
#include "doubles/bare_path.hpp"
#include "fabric/nic/nic_domain.hpp"
#include "memory_region.hpp"

namespace kvxfer::test {

// True if this run does not cover verbs; it then prints why.
bool skipped_without_verbs();
// The fabrics of VerbsBench that this run covers: mlx5, verbs.
std::vector<std::string> verbs_fabrics();

class VerbsBench final : private NicEvents {
 public:
  // Opens all the devices that KVXFER_TEST_NICS allows.
  explicit VerbsBench(const std::string& fabric = "verbs");
  ~VerbsBench();

  NicDomain& nic(std::size_t number) { return *nics_[number % nics_.size()]; }
  Result<BarePath> open(std::size_t nic);
  struct Joined {
    BarePath writer;
    BarePath reader;
  };
  // Joins the first NIC to the last.
  Joined join();
  RegionPtr region(std::size_t bytes);
  // An operation that writes `source` to `destination` in pieces, each with the immediate if there
  // is one.
  OperationPtr operation(const RegionPtr& source, const RemoteKey& destination, std::size_t pieces,
                         std::uint32_t piece_bytes, std::optional<Imm> imm);
  RemoteKey key(const RegionPtr& region);
  // Posts as many pieces as there is room for.
  void post(NicPath& path, const OperationPtr& operation);
  void poll();
  // Polls until the condition is true; fails the test at a deadline.
  void until(const std::function<bool()>& so);

  std::unique_ptr<CompletionQueue> completions;
  ImmCounters counters;
  EngineStats stats;
  Poller poller;
  std::map<const Path*, Error> lost;

 private:
  void on_finished(const OperationPtr& operation, const WriteRange& writes,
                   const Error& error) override;
  void on_lost(Path& path, Error error) override { lost[&path] = std::move(error); }
  void on_nic_state(NicDomain&) override {}
  void on_credit_due(NicPath&) override {}
  void on_refused(NicPath&, Imm) override {}
  void on_window(NicPath&, std::uint64_t) override {}

  EngineOptions options_;
  RegionTable regions_;
  std::uint64_t activity_ = 0;
  cuda::Gpus gpus_;
  std::vector<std::unique_ptr<NicDomain>> nics_;
  Background background_{poller};
  PathId last_path_ = 0;
};

}  // namespace kvxfer::test
