// Both directions between two engines of one host. The receiver copies from the sender's memory, so
// that a sender that was frozen and wakes up later can change nothing at the receiver. A GPU copies
// batches into its memory, many with one launch; they count in their order, once the launch has
// ended.
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

// The result of a rendezvous.
struct LocalLink {
  UniqueFd socket;     // shares regions; its end of file reports the peer's exit
  SharedRing out;      // ours to produce into
  SharedRing in;       // ours to consume from
  UniqueFd wake_peer;  // eventfd that ends the peer's sleep
  pid_t pid = 0;
  UniqueFd pidfd;
  bool peer_reads_us = false;  // process_vm_readv is permitted to the peer
  bool we_read_peer = false;   // and to this process
};

class LocalPath final : public Path, private EventSink {
 public:
  static Result<std::unique_ptr<LocalPath>> open(LocalLink link, PathPeer peer, Poller& poller,
                                                 ReceiveContext receive_context, PathEvents& events,
                                                 GpuContext gpus);
  ~LocalPath() override;
  // Sets the function that the destructor calls last.
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
    bool last;  // the operation's last batch
    std::uint64_t bytes = 0;
    std::uint64_t head = 0;  // position in the ring
    std::uint64_t end = 0;
    std::optional<cuda::StagingSlot> slot;  // staging slot that the peer reads
  };
  // A batch that is copied out of a GPU before it is posted.
  struct Staged {
    Batch batch;
    std::shared_ptr<cuda::Gpu> gpu;
    cuda::Ticket copied;
  };
  // The source of a batch: offsets in a shared region, or addresses in this process.
  struct Origin {
    std::optional<std::uint32_t> region;
    std::uint64_t base = 0;
  };

  // A batch that has arrived and is counted in its turn.
  struct Placing {
    Placement placement;
    std::uint64_t head;  // position in the ring
    std::uint64_t end;
    cuda::Ticket copied = 0;  // 0 if the processor has copied it
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
  // Places a batch, and takes its cost from the budget. Returns false if it waits for room at a
  // GPU.
  Result<bool> place(const BatchHead& head, std::uint64_t& budget);
  Result<bool> copy_from_host(const BatchHead& head, Placing& batch, std::byte* slot = nullptr);
  Result<bool> copy_by_gpu(const BatchHead& head, Placing& batch, std::uint64_t& cost);
  void launch();
  bool end_placed();
  void receive_regions();
  Result<void> on_region(UnixMessage& message, bool lacking);
  Result<void> on_gpu_region(const GpuRegionMessage& region, UnixMessage& message, bool lacking);
  // `why`: the reason of a refusal.
  void answer_gpu_region(RegionMessage::Kind kind, std::uint32_t number, std::string_view why = {});

  std::uint64_t wanted_progress() const;
  void wake_peer();
  void lose(Error error);

  [[no_unique_address]] ThreadOwner thread_;
  std::shared_ptr<UniqueFd> socket_;
  std::shared_ptr<void> open_;  // keeps the peer from seeing the socket's end
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
  std::size_t slots_ = 0;  // staging slots of unacked_ and staged_
  std::unordered_map<std::uint64_t, std::uint32_t> shared_;  // region key → number
  std::uint32_t next_number_ = 0;
  std::deque<std::uint32_t> to_forget_;  // region numbers

  std::uint64_t taken_ = 0;                // end of the entries looked at
  std::uint64_t consumed_ = 0;             // end of the batches counted
  std::vector<cuda::DeviceCopy> entries_;  // writes of one batch
  std::vector<PageCopy> copies_;
  std::deque<Placing> placing_;
  bool waits_ = false;  // waits for room at a GPU
  GpuShares gpu_shares_;
  GpuSources gpu_sources_;
  // The next launch, for which batches are collected.
  std::shared_ptr<cuda::Gpu> collecting_;
  std::size_t collected_ = 0;
  std::vector<cuda::StagingSlot> collected_slots_;
  std::deque<std::pair<std::shared_ptr<cuda::Gpu>, cuda::Ticket>> launches_;  // launches under way
  bool lost_ = false;
  std::function<void()> then_;
};

}  // namespace kvxfer::local
