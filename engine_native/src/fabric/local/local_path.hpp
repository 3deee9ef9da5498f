// Both directions between two engines of one host. The receiver copies out of the sender's memory:
// a sender that is frozen and wakes up later can change nothing at the receiver. Memory of a GPU is
// copied by that GPU, many batches with one launch; they count once it has ended, and in their
// order.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "domain.hpp"
#include "fabric/local/gpu_shares.hpp"
#include "fabric/local/gpu_sources.hpp"
#include "fabric/local/page_copy.hpp"
#include "fabric/local/ring.hpp"
#include "fabric/local/source_memory.hpp"
#include "fabric/local/unix_socket.hpp"
#include "fd.hpp"
#include "placement.hpp"
#include "poller.hpp"
#include "thread_owner.hpp"

namespace kvxfer::local {

// What a rendezvous hands over.
struct LocalLink {
  UniqueFd socket;     // shares regions; its end of file tells of the peer's exit
  SharedRing out;      // ours to produce into
  SharedRing in;       // ours to consume from
  UniqueFd wake_peer;  // eventfd that ends the peer's sleep
  pid_t pid = 0;
  UniqueFd pidfd;
  bool peer_reads_us = false;  // process_vm_readv is permitted to the peer
  bool we_read_peer = false;   // and to us
};

class LocalPath final : public Path, private EventSink {
 public:
  static Result<std::unique_ptr<LocalPath>> open(LocalLink link, PathPeer peer, Poller& poller,
                                                 ReceiveContext receive_context, PathEvents& events,
                                                 GpuContext gpus);
  ~LocalPath() override;
  // What follows when it is destroyed.
  void on_destroyed(std::function<void()> then) { then_ = std::move(then); }

  std::string_view fabric() const override { return "local"; }
  PathRank rank() const override { return PathRank::local; }
  bool reaches(const Operation& operation) const override;
  bool has_room(const Operation& operation, bool counted) const override;
  std::size_t post(const OperationPtr& operation, const WriteRange& writes) override;
  void revoke_counter(Imm imm) override;
  void revoke_region(std::uint64_t key) override;

  pid_t pid() const override { return source_.pid(); }
  void poll();
  // Asks both rings for a wake-up; false if there is work after all.
  bool prepare_sleep();
  void finish_sleep();
  void forget_source(const MemoryRegion& region);

 private:
  struct Batch {
    OperationPtr operation;
    WriteRange writes;
    bool last;  // of its operation
    std::uint64_t bytes = 0;
    std::uint64_t head = 0;  // position in the ring
    std::uint64_t end = 0;
    std::optional<cuda::StagingSlot> slot;  // that the peer reads it from
  };
  // Being copied out of a GPU; then it is posted.
  struct Staged {
    Batch batch;
    std::shared_ptr<cuda::Gpu> gpu;
    cuda::Ticket copied;
  };
  // Where the writes of a batch are read from: offsets in a shared region, or addresses over here.
  struct Origin {
    std::optional<std::uint32_t> region;
    std::uint64_t base = 0;
  };

  // What arrived, and is to be counted in its turn.
  struct Placing {
    Placement placement;
    std::uint64_t head;  // position in the ring
    std::uint64_t end;
    cuda::Ticket copied = 0;  // 0: the processor has copied it
    std::uint32_t writes = 0;
    std::uint64_t immediates = 0;
    std::uint64_t bytes = 0;
  };

  LocalPath(LocalLink link, PathPeer peer, Poller& poller, ReceiveContext receive_context,
            PathEvents& events, GpuContext gpus);

  void on_events(std::uint32_t events) override;

  // Sending.
  std::optional<std::uint32_t> share(const MemoryRegion& region);
  std::optional<Origin> origin_of(const MemoryRegion& region);
  bool asked_if_alive(Operation& operation);
  std::size_t room() const;
  void produce(Batch batch, const Origin& origin, bool packed);
  std::size_t stage(const OperationPtr& operation, const WriteRange& range);
  bool post_staged();
  void send_forgets();
  bool reap();
  // Receiving.
  bool consume();
  // False: it has to wait for room at a GPU. Takes what it costs from the budget.
  Result<bool> place(const BatchHead& head, std::uint64_t& budget);
  Result<bool> copy_from_host(const BatchHead& head, Placing& batch, std::byte* slot = nullptr);
  Result<bool> copy_by_gpu(const BatchHead& head, Placing& batch, std::uint64_t& cost);
  void launch();
  bool end_placed();
  void receive_regions();
  Result<void> on_region(UnixMessage& message, bool lacking);
  Result<void> on_gpu_region(const GpuRegionMessage& region, UnixMessage& message, bool lacking);
  // `why`: of a refusal.
  void answer_gpu_region(RegionMessage::Kind kind, std::uint32_t number, std::string_view why = {});

  std::uint64_t wanted_progress() const;
  void wake_peer();
  void lose(Error error);

  [[no_unique_address]] ThreadOwner thread_;
  std::shared_ptr<UniqueFd> socket_;
  std::shared_ptr<void> open_;  // until this is gone, the peer does not see the socket's end
  SharedRing out_;
  SharedRing in_;
  UniqueFd wake_peer_;
  SourceMemory source_;
  bool peer_reads_us_;
  PathPeer peer_;
  LentMemory& lent_;
  Poller& poller_;
  ReceiveContext receive_context_;
  PathEvents& events_;

  std::uint64_t produced_ = 0;
  std::uint64_t reaped_ = 0;
  std::deque<Batch> unacked_;
  std::deque<Staged> staged_;
  std::size_t slots_ = 0;                                    // of both
  std::unordered_map<std::uint64_t, std::uint32_t> shared_;  // region key → number
  std::uint32_t next_number_ = 0;
  std::deque<std::uint32_t> to_forget_;  // numbers

  std::uint64_t taken_ = 0;                // looked at
  std::uint64_t consumed_ = 0;             // and counted
  std::vector<cuda::DeviceCopy> entries_;  // of one batch
  std::vector<PageCopy> copies_;
  std::deque<Placing> placing_;
  bool waits_ = false;  // for room at a GPU
  GpuShares gpu_shares_;
  GpuSources gpu_sources_;
  // The launch that batches are being collected for.
  std::shared_ptr<cuda::Gpu> collecting_;
  std::size_t collected_ = 0;
  std::vector<cuda::StagingSlot> collected_slots_;
  std::deque<std::pair<std::shared_ptr<cuda::Gpu>, cuda::Ticket>> launches_;  // under way
  bool lost_ = false;
  std::function<void()> then_;
};

}  // namespace kvxfer::local
