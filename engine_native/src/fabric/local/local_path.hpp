// Both directions between two engines of one host. The receiver copies out of the sender's memory:
// a sender that is frozen and wakes up later can change nothing at the receiver.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "domain.hpp"
#include "fabric/local/page_copy.hpp"
#include "fabric/local/ring.hpp"
#include "fabric/local/source_memory.hpp"
#include "fd.hpp"
#include "placement.hpp"
#include "poller.hpp"

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
                                                 ReceiveContext receive_context,
                                                 PathEvents& events);
  ~LocalPath() override;
  // What follows when it is destroyed.
  void on_destroyed(std::function<void()> then) { then_ = std::move(then); }

  std::string_view fabric() const override { return "local"; }
  PathRank rank() const override { return PathRank::local; }
  bool reaches(const Operation& operation) const override {
    const auto& source = operation.source;
    return !operation.nic && (!source || source->shareable() || peer_reads_us_);
  }
  bool has_room(bool counted) const override;
  std::size_t post(const OperationPtr& operation, const WriteRange& writes) override;
  // Batches are placed whole within poll(), so nothing is ever half placed here.
  void revoke_counter(Imm) override {}
  void revoke_region(std::uint64_t) override {}

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
    std::uint64_t bytes;
    std::uint64_t head;  // position in the ring
    std::uint64_t end;
    bool last;  // of its operation
  };

  LocalPath(LocalLink link, PathPeer peer, Poller& poller, ReceiveContext receive_context,
            PathEvents& events);

  void on_events(std::uint32_t events) override;

  // Sending.
  std::optional<std::uint32_t> share(const MemoryRegion& region);
  bool reap();
  // Receiving.
  bool consume();
  Result<std::uint64_t> place(const BatchHead& head, Errc& status);
  void receive_regions();

  std::uint64_t wanted_progress() const;
  void wake_peer();
  void lose(Error error);

  UniqueFd socket_;
  SharedRing out_;
  SharedRing in_;
  UniqueFd wake_peer_;
  SourceMemory source_;
  bool peer_reads_us_;
  PathPeer peer_;
  Poller& poller_;
  ReceiveContext receive_context_;
  PathEvents& events_;

  std::uint64_t produced_ = 0;
  std::uint64_t reaped_ = 0;
  std::deque<Batch> unacked_;
  std::unordered_map<std::uint64_t, std::uint32_t> shared_;  // region key → number
  std::uint32_t next_number_ = 0;

  std::uint64_t consumed_ = 0;
  std::vector<PageCopy> copies_;
  bool lost_ = false;
  std::function<void()> then_;
};

}  // namespace kvxfer::local
