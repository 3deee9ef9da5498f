// A libfabric endpoint with its completion queue and its table of peers' addresses. Engine thread,
// except reset().
//
// Several paths share one where closing a region's key is a fence by itself; otherwise each has
// its own, and closing that is the fence.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "fabric/ofi/completion.hpp"
#include "fabric/ofi/disorder.hpp"
#include "fabric/ofi/open_domain.hpp"
#include "poller.hpp"

namespace kvxfer::ofi {

class Endpoint final : private EventSink {
 public:
  // What the completion queue and the receives are sized for.
  struct Budget {
    std::size_t writes;  // under way
    std::size_t paths;
    std::size_t immediates;  // of each path's peer, under way, besides its greeting
  };

  struct Options {
    Budget budget;
    bool wait_object = true;
    std::optional<std::uint64_t> disorder_seed;  // none: completions come as they are
  };
  struct Write {
    CompletionSink* path;
    std::uint64_t sequence;
    fi_addr_t to;
    const void* source;
    void* descriptor;  // of the source, where the provider needs one
    std::uint32_t length;
    std::uint64_t address;
    std::uint64_t rkey;
    std::optional<Imm> imm;
  };
  // Where writes without bytes go: EFA wants a valid key for those too.
  struct Landing {
    UniqueFid<fid_mr> writable;
    std::uint64_t address = 0;
    std::uint64_t rkey = 0;
  };

  static Result<std::unique_ptr<Endpoint>> open(std::shared_ptr<const OpenDomain> domain,
                                                Poller& poller, const Options& options);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const std::string& address() const { return address_; }
  // Random, so that an endpoint that got another's address is a different one.
  std::uint64_t token() const { return token_; }
  Result<Landing> make_landing() const;
  const void* landing() const { return landing_.data(); }
  void* landing_descriptor() const {
    return landing_readable_ ? ::fi_mr_desc(landing_readable_.get()) : nullptr;
  }

  // --- paths
  bool full() const { return paths_ >= options_.budget.paths; }
  std::size_t paths() const { return paths_; }
  void reserve() { ++paths_; }
  void give_back() { --paths_; }
  // Whether a path between this endpoint and that one is there, or was lately: what is left of it
  // in the network could not be told from a new one's.
  bool met(std::uint64_t token) const;
  Result<fi_addr_t> attach(CompletionSink& path, const std::string& address, std::uint64_t token);
  // Afterwards nothing is reported to the path any more.
  void detach(CompletionSink& path);
  // Whether writes of the path are under way.
  bool writes_for(const CompletionSink& path) const;

  // --- writes
  bool has_room() const { return free_ && !refused_; }
  std::size_t in_flight() const { return in_flight_; }
  // 0, or libfabric's error; -FI_EAGAIN: later.
  ssize_t post(const Write& write);

  // --- completions
  // An error if no more can come.
  Result<void> poll();
  bool has_wait_object() const { return wait_fd_ >= 0; }
  // False if there are completions.
  bool prepare_sleep();
  // Something was refused by the provider and nothing may tell when that changes.
  bool refused() const { return refused_; }

  // Nothing lands through it any more, and it reads nothing. Completions stay. Only if it may.
  void close() {
    const std::lock_guard lock(gate_);
    endpoint_.reset();
  }
  // libfabric's tcp (2.5.1) uses freed memory if an endpoint is closed while a peer is connecting
  // to it. So one that awaits its peer's greeting is left open: nothing else comes until that is
  // answered. Any thread.
  bool may_close() const { return may_close_; }
  void allow_close() { may_close_ = true; }
  // Closes it from any thread; its paths are told at the next poll.
  void reset() {
    close();
    poller_.wake();
  }
  // When its path was shut while it may not be closed; 0: not so.
  std::uint64_t parked_ns = 0;

  bool open() const {
    const std::lock_guard lock(gate_);
    return endpoint_ != nullptr;
  }
  // Reports all that is there already.
  void take_completions(CompletionSink& of);
  // For error texts; empty without.
  std::string seed_text() const;

 private:
  struct Context {
    fi_context2 space;  // the provider's while an operation is under way; first
    CompletionSink* path;
    std::uint64_t sequence;
    Context* next;
    bool receive;
  };
  struct Source {
    CompletionSink* path;
    std::uint64_t token;
  };

  Endpoint(std::shared_ptr<const OpenDomain> domain, Poller& poller, const Options& options);
  Result<void> start();
  Result<void> open_queue();
  void post_receives();
  Context* context_of(void* space) const;
  void put_back(Context& context);
  // How many were read; negative: none, and why.
  ssize_t read_completions();
  void read_errors();
  void take(const fi_cq_data_entry& entry, fi_addr_t source);
  void pass(const Completion& completion);
  void report(const Completion& completion);
  void report_immediates();
  void on_events(std::uint32_t) override {}  // poll() follows

  std::shared_ptr<const OpenDomain> domain_;
  Poller& poller_;
  Options options_;
  std::optional<Disorder> disorder_;
  alignas(64) std::array<std::byte, 64> landing_{};
  UniqueFid<fid_mr> landing_readable_;
  std::unique_ptr<Context[]> contexts_;
  std::size_t context_count_ = 0;
  Context* free_ = nullptr;      // for writes
  Context* unposted_ = nullptr;  // receives
  UniqueFid<fid_av> peers_;
  UniqueFid<fid_cq> queue_;
  std::atomic<bool> may_close_ = false;
  mutable std::mutex gate_;
  UniqueFid<fid_ep> endpoint_;  // guarded
  int wait_fd_ = -1;
  std::string address_;
  std::uint64_t token_ = 0;
  std::size_t paths_ = 0;
  std::size_t in_flight_ = 0;
  bool refused_ = false;
  std::unordered_map<fi_addr_t, Source> sources_;
  std::unordered_map<std::uint64_t, std::uint64_t> met_;  // token → when it may be met again
  Completion run_{};                                      // of equal immediates, not reported yet
  std::uint64_t run_length_ = 0;
};

}  // namespace kvxfer::ofi
