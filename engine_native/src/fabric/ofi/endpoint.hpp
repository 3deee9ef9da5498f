// A libfabric endpoint for one path, with its completion queue and its table of one address. Only
// the peer is told of it, so closing it is the fence: nothing of the peer's lands any more.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "fabric/ofi/disorder.hpp"
#include "fabric/ofi/open_domain.hpp"
#include "poller.hpp"
#include "thread_owner.hpp"

namespace kvxfer::ofi {

// The path of an endpoint, to which its completion queue reports.
class CompletionSink {
 public:
  // Called when the write is delivered.
  virtual void on_written(std::uint64_t sequence) = 0;
  virtual void on_arrived(Imm imm, std::uint64_t count) = 0;
  // Called when a write was not delivered, or the endpoint is broken.
  virtual void on_failed(Error error) = 0;

 protected:
  ~CompletionSink() = default;
};

class Endpoint final : private EventSink {
 public:
  struct Options {
    std::size_t writes;      // under way, at most
    std::size_t immediates;  // the peer's under way, at most, besides its greeting
    bool wait_object = true;
    std::optional<std::uint64_t> disorder_seed;  // nullopt: completions keep their order
  };
  struct Write {
    std::uint64_t sequence;
    std::uint64_t source;  // an address, also of a GPU's memory
    void* descriptor;      // the source's, if the provider needs one
    std::uint32_t length;
    std::uint64_t address;
    std::uint64_t rkey;
    std::optional<Imm> imm;
    bool more = false;  // another follows at once, so one doorbell is enough
  };

  // --- any thread; these functions and the destructor take long
  static Result<std::shared_ptr<Endpoint>> open(std::shared_ptr<const OpenDomain> domain,
                                                const Poller& poller, const Options& options);
  ~Endpoint() { close(); }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;
  // Sets the destination of writes. Called once, before any write.
  Result<void> attach(const std::string& peer_address);
  // Closes the endpoint: nothing lands through it any more, and it reads nothing. Completions stay.
  void close();
  // Closes the endpoint; its path is told at the next poll.
  void reset();
  bool open() const { return !closed_; }
  // On a device that takes memory of GPUs: success if the NIC alone moves the bytes. If not,
  // libfabric would copy them, by calls of CUDA that can wait for the user's kernels.
  const Result<void>& for_gpus() const { return for_gpus_; }

  // --- engine thread
  // Reports completions to the path until leave(); the poller wakes for them.
  void serve(CompletionSink& path, Poller& poller);
  void leave(Poller& poller);
  const std::string& address() const { return address_; }
  // Returns the destination of writes without bytes: EFA requires a valid key for those, too.
  std::uint64_t landing_address() const { return domain_->remote_start(landing()); }
  std::uint64_t landing_key() const { return ::fi_mr_key(landing_memory_.get()); }
  std::uint64_t landing() const { return reinterpret_cast<std::uint64_t>(landing_.data()); }
  void* landing_descriptor() const {
    return domain_->local_keys ? ::fi_mr_desc(landing_memory_.get()) : nullptr;
  }

  // --- writes
  bool has_room() const { return free_ && !refused_; }
  std::size_t in_flight() const { return in_flight_; }
  std::size_t immediates() const { return options_.immediates; }
  // Posts a write. Returns 0 or libfabric's error; -FI_EAGAIN means later.
  ssize_t post(const Write& write);

  // --- completions
  void poll();
  bool has_wait_object() const { return wait_fd_ >= 0; }
  // Returns false if there are completions, or receives to post.
  bool prepare_sleep();
  // True if the provider refused an operation, and no event may report that it takes one again.
  bool refused() const { return refused_; }
  // Reports all completions that have arrived.
  void take_completions();

 private:
  struct Context {
    fi_context2 space;  // first; the provider's while an operation is under way
    std::uint64_t sequence;
    Context* next;
    bool receive;
  };

  Endpoint(std::shared_ptr<const OpenDomain> domain, const Poller& poller, const Options& options);
  Result<void> start();
  Result<void> open_queue();
  Result<void> leave_gpus_to_nic() const;
  // Returns the size of the completion queue. Nothing else keeps it from overrunning; receives end
  // up in it, too, when the endpoint is closed.
  std::size_t queue_size() const { return options_.writes + 2 * (options_.immediates + 1); }
  Error failed(std::string_view what, ssize_t error) const;
  void end_connections();
  void post_receives();
  Context* context_of(void* space) const;
  void put_back(Context& context);
  // Returns the number of completions read, or a negative error if there are none.
  ssize_t read_completions();
  void read_errors();
  void take(const fi_cq_data_entry& entry);
  void pass(const Completion& completion);
  void report(const Completion& completion);
  void report_immediates();
  void on_events(std::uint32_t) override {}  // poll() follows

  [[no_unique_address]] ThreadOwner thread_;
  std::shared_ptr<const OpenDomain> domain_;
  const Poller& poller_;
  Options options_;
  std::optional<Disorder> disorder_;
  CompletionSink* path_ = nullptr;
  alignas(64) std::array<std::byte, 64> landing_{};
  UniqueFid<fid_mr> landing_memory_;
  std::unique_ptr<Context[]> contexts_;
  std::size_t context_count_ = 0;
  Context* free_ = nullptr;      // contexts for writes
  Context* unposted_ = nullptr;  // contexts of receives to be posted
  UniqueFid<fid_av> peers_;
  fi_addr_t to_ = FI_ADDR_NOTAVAIL;
  UniqueFid<fid_cq> queue_;
  // Held while the endpoint is closed, which takes long, so the engine thread only tries to lock
  // it.
  mutable std::mutex gate_;
  UniqueFid<fid_ep> endpoint_;  // guarded by gate_
  std::atomic<bool> closed_ = false;
  std::atomic<int> failed_ = 0;  // libfabric's error number, from the event queue
  Result<void> for_gpus_;
  int wait_fd_ = -1;
  std::string address_;
  std::size_t in_flight_ = 0;
  bool refused_ = false;
  bool chained_ = false;  // the last write was posted with FI_MORE
  Imm run_imm_ = 0;       // a run of equal immediates that are not reported yet
  std::uint64_t run_length_ = 0;
};

}  // namespace kvxfer::ofi
