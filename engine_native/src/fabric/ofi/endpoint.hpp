// A libfabric endpoint for one path, with its completion queue and its table of one address. The
// peer alone is told of it, so closing it is the fence: nothing of the peer's lands any more.
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

// What an endpoint's completion queue tells its path.
class CompletionSink {
 public:
  // The write is delivered.
  virtual void on_written(std::uint64_t sequence) = 0;
  virtual void on_arrived(Imm imm, std::uint64_t count) = 0;
  // A write was not delivered, or the endpoint is broken.
  virtual void on_failed(Error error) = 0;

 protected:
  ~CompletionSink() = default;
};

class Endpoint final : private EventSink {
 public:
  struct Options {
    std::size_t writes;      // under way
    std::size_t immediates;  // of the peer, under way, besides its greeting
    bool wait_object = true;
    std::optional<std::uint64_t> disorder_seed;  // none: completions come as they are
  };
  struct Write {
    std::uint64_t sequence;
    std::uint64_t source;  // an address, also of a GPU's memory
    void* descriptor;      // of the source, where the provider needs one
    std::uint32_t length;
    std::uint64_t address;
    std::uint64_t rkey;
    std::optional<Imm> imm;
    bool more = false;  // another follows at once: one doorbell will do
  };

  // --- any thread; these take long, and so does its end
  static Result<std::shared_ptr<Endpoint>> open(std::shared_ptr<const OpenDomain> domain,
                                                const Poller& poller, const Options& options);
  ~Endpoint() { close(); }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;
  // Where writes go. Once, before any.
  Result<void> attach(const std::string& peer_address);
  // Nothing lands through it any more, and it reads nothing. Completions stay.
  void close();
  // Closes it; its path is told at the next poll.
  void reset();
  bool open() const { return !closed_; }
  // On a device that takes GPUs' memory: whether the NIC alone moves its bytes. Where it could not,
  // libfabric would copy them, by calls of CUDA that can wait for kernels of the user's.
  const Result<void>& for_gpus() const { return for_gpus_; }

  // --- engine thread
  // Reports to the path, until leave(); the poller wakes for its completions.
  void serve(CompletionSink& path, Poller& poller);
  void leave(Poller& poller);
  const std::string& address() const { return address_; }
  // Where writes without bytes go: EFA wants a valid key for those too.
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
  // 0, or libfabric's error; -FI_EAGAIN: later.
  ssize_t post(const Write& write);

  // --- completions
  void poll();
  bool has_wait_object() const { return wait_fd_ >= 0; }
  // False if there are completions.
  bool prepare_sleep();
  // Something was refused by the provider and nothing may tell when that changes.
  bool refused() const { return refused_; }
  // Reports all that is there already.
  void take_completions();

 private:
  struct Context {
    fi_context2 space;  // the provider's while an operation is under way; first
    std::uint64_t sequence;
    Context* next;
    bool receive;
  };

  Endpoint(std::shared_ptr<const OpenDomain> domain, const Poller& poller, const Options& options);
  Result<void> start();
  Result<void> open_queue();
  Result<void> leave_gpus_to_nic() const;
  // Nothing guards it against running over; receives end up there too when the endpoint is closed.
  std::size_t queue_size() const { return options_.writes + 2 * (options_.immediates + 1); }
  Error failed(std::string_view what, ssize_t error) const;
  void end_connections();
  void post_receives();
  Context* context_of(void* space) const;
  void put_back(Context& context);
  // How many were read; negative: none, and why.
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
  Context* free_ = nullptr;      // for writes
  Context* unposted_ = nullptr;  // receives
  UniqueFid<fid_av> peers_;
  fi_addr_t to_ = FI_ADDR_NOTAVAIL;
  UniqueFid<fid_cq> queue_;
  // Held while it is closed, which takes long: the engine thread only tries.
  mutable std::mutex gate_;
  UniqueFid<fid_ep> endpoint_;  // guarded
  std::atomic<bool> closed_ = false;
  std::atomic<int> failed_ = 0;  // libfabric's number, from the event queue
  Result<void> for_gpus_;
  int wait_fd_ = -1;
  std::string address_;
  std::size_t in_flight_ = 0;
  bool refused_ = false;
  bool chained_ = false;  // the last write was posted with FI_MORE
  Imm run_imm_ = 0;       // of equal immediates, not reported yet
  std::uint64_t run_length_ = 0;
};

}  // namespace kvxfer::ofi
