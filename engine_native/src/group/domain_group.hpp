// The domains of an engine, and all that its thread does with them. The members do the work; this
// class connects them and gives the order of a step.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "background.hpp"
#include "completion_queue.hpp"
#include "cuda/gpus.hpp"
#include "group/connections.hpp"
#include "group/engine_loop.hpp"
#include "group/exposed_memory.hpp"
#include "group/fabrics.hpp"
#include "group/operations.hpp"
#include "group/peers.hpp"
#include "group/stream_waits.hpp"
#include "imm_counter.hpp"
#include "kvxfer/types.hpp"

namespace kvxfer {

class DomainGroup final : private LoopWork, private NicEvents, private PeerEvents {
 public:
  static Result<std::unique_ptr<DomainGroup>> open(EngineOptions options);
  ~DomainGroup();

  // --- any thread
  const EngineAddress& address() const { return address_; }
  const EngineOptions& options() const { return options_; }
  CompletionQueue& completions() { return *completions_; }
  ImmCounters& counters() { return counters_; }
  cuda::Gpus& gpus() { return gpus_; }
  SpareWrites& spare_writes() { return operations_.spare_writes(); }
  OperationId next_operation_id() { return operations_.next_id(); }
  // The engine's NICs, by number.
  const std::vector<NicInfo>& nics() const { return identity_.introduction.nics; }
  // The fabrics in use, in order of preference.
  const std::vector<std::string>& fabrics() const { return fabrics_.names(); }
  // Registers memory with every NIC that can reach it, then lets peers write into it.
  Result<void> register_region(const RegionPtr& region, bool require_nics);
  std::shared_ptr<PeerHandle> find_peer(PeerId peer) const {
    return loop_.process().here() ? peers_.handle(peer) : nullptr;
  }

  void submit(const SubmissionPtr& submission);
  // Checks watched words now.
  void wake() { loop_.wake(); }
  void send(PeerId peer, std::string data);
  void cancel(OperationId operation);
  void connect(OperationId id, const EngineAddress& address, Duration timeout);
  // Without an engine thread: runs one step on the caller's thread.
  bool poll() { return loop_.poll(); }
  // Queues the wait, which ends in any case.
  void wait_for_stream(const StreamWaits::Waiting& waiting);
  void mirror_counter(Imm imm, const std::shared_ptr<cuda::MirroredCount>& mirror);
  // The following return once the engine thread has done the work.
  void disconnect(PeerId peer);
  bool fence(PeerId peer);
  Result<std::vector<MrDescriptor>> grant(Imm imm, std::span<const RegionRange> ranges);
  // Returns false if peers must be asked first, because no NIC could be told to refuse, or a GPU is
  // copying: then Completion::Kind::released follows. `wait`: waits for that instead.
  bool release_counter(Imm imm, bool wait);
  // Fails if a NIC does not release the memory; the call may be repeated.
  Result<void> deregister(const RegionPtr& region);
  EngineStats stats();
  void close() { loop_.close(); }
  // Fails in a process that was forked from the engine's.
  Result<void> require_own_process() const { return loop_.process().require_here("the engine"); }
  // Fails likewise, and once the engine is closed.
  Result<void> require_open() const;

 private:
  // Memory whose owner waits until nothing reads it or writes there.
  struct Deregistering {
    RegionPtr region;
    std::shared_ptr<std::promise<Result<void>>> unused;  // null: answered
    bool copied = false;  // the GPU copies that were under way have ended
  };

  DomainGroup(EngineOptions options, Poller poller, std::unique_ptr<CompletionQueue> completions,
              std::unique_ptr<Acceptor> acceptor);
  Result<void> start();

  // --- engine thread: LoopWork
  void step() override;
  std::uint64_t next_step_ns(std::uint64_t now, std::uint64_t quiet_ns) const override;
  bool prepare_sleep() override;
  void finish_sleep() override { fabrics_.finish_sleep(); }
  void shut_down() override;
  void tick(std::uint64_t now);

  // --- engine thread: closing peers
  // Fences the peer first; then callers that wait may free memory.
  void close_peer(PeerId id, const Error& error);
  void finish_closing(PeerId id);
  // Returns false if there is no such peer.
  bool close_and_wait(PeerId peer, const Error& why, bool say_goodbye);
  void bury_lost_peers();
  void end_deregistrations(std::uint64_t now);
  bool is_late(const local::LentMemory::Loan& loan, std::uint64_t now) const;

  // --- engine thread: PeerEvents
  void on_up(Peer& peer) override;
  void on_message(Peer& peer, std::string data) override;
  void on_posted(std::size_t writes) override { stats_.writes_posted += writes; }
  void on_peer_lost(Peer& peer, Error error) override;
  void share_region(Peer& peer, std::uint64_t key) override { exposed_.share(peer, key); }
  void on_revoked(Peer& peer, Imm imm) override { exposed_.on_revoked(peer.id(), imm); }
  void on_notice(Peer& peer, std::string text) override;

  // --- engine thread: NicEvents
  void on_finished(const OperationPtr& operation, const WriteRange& writes,
                   const Error& error) override {
    operations_.on_finished(operation, writes, error);
  }
  void on_lost(Path& path, Error error) override;
  void on_nic_state(NicDomain& domain) override;
  void on_credit_due(NicPath& path) override;
  void on_refused(NicPath& path, Imm imm) override;
  void on_window(NicPath& path, std::uint64_t grant) override;

  EngineOptions options_;
  EngineAddress address_;
  Identity identity_;
  std::unique_ptr<CompletionQueue> completions_;
  ImmCounters counters_;
  RegionTable regions_;
  EngineStats stats_;
  cuda::Gpus gpus_;
  EngineLoop loop_;  // drives the members below until close(); its poller outlives them
  Operations operations_;
  local::LentMemory lent_{loop_.poller()};
  Fabrics fabrics_;
  Peers peers_;  // after fabrics_, whose domains outlive their paths
  ExposedMemory exposed_;
  StreamWaits stream_waits_{counters_};
  Connections connections_;

  // Engine thread.
  std::vector<std::pair<PeerId, Error>> lost_;  // to be closed at the end of the step
  std::vector<Deregistering> deregistering_;
  std::uint64_t last_tick_ns_ = 0;
  Background background_;  // last: its threads end before what they work on
};

}  // namespace kvxfer
