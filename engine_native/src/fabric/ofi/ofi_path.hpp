// A path over libfabric: a pair of endpoints, one of them ours.
//
// It carries writes once each end has had a greeting from the other's, a write to its landing with
// an immediate that no counter has, and knows that its greeting has arrived. The initiator greets
// first. So a path that is open works, in both directions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "fabric/nic/nic_domain.hpp"
#include "fabric/ofi/endpoint.hpp"
#include "fabric/ofi/flushes.hpp"
#include "thread_owner.hpp"

namespace kvxfer::ofi {

class OfiDomain;
struct PathEndpoint;

// Under way on one path.
inline constexpr std::size_t kMaxWritesOfPath = 1024;
// Immediates of one path's peer that may be under way: 4 KiB each fill a link of 200 Gbit/s for
// 160 us, in which credit comes back over the control stream.
inline constexpr std::uint64_t kImmWindow = 1024;

class OfiPath final : public NicPath, private CompletionSink {
 public:
  OfiPath(NicPathIdentity identity, OfiDomain& domain, std::shared_ptr<Endpoint> endpoint);

  std::string_view fabric() const override { return "ofi"; }
  std::string endpoint() const override;
  void connect(std::string_view endpoint, Connected then) override;
  bool proven() const override { return heard_ && greeting_arrived_; }
  std::string_view likely_cause() const override;
  bool has_room(const Operation& operation, bool counted) const override;
  std::size_t post(const OperationPtr& operation, const WriteRange& writes) override;
  void shut(std::function<void()> then) override;

  // The NIC is down.
  void fail(Error error) { on_failed(std::move(error)); }
  // Takes completions, and sends what is due besides writes: a greeting, a flush.
  void poll();
  // Null once it is being closed.
  Endpoint* served() const { return closing_ ? nullptr : endpoint_.get(); }

 private:
  void on_written(std::uint64_t sequence) override;
  void on_arrived(Imm imm, std::uint64_t count) override;
  void on_failed(Error error) override;
  ssize_t post_one(const Operation& operation, const WireWrite& write, bool counted, bool more);
  // Posts a write that carries no payload: a greeting, a flush, a bare immediate.
  ssize_t post_to_landing(std::uint64_t sequence, std::optional<Imm> imm);
  void on_joined(Result<void> joined, const PathEndpoint& theirs);
  void greet();
  void flush();
  // Whether it was posted.
  bool took(ssize_t error);
  void stop();
  void end();

  [[no_unique_address]] ThreadOwner thread_;
  OfiDomain& domain_;
  std::shared_ptr<Endpoint> endpoint_;
  std::uint64_t landing_address_ = 0;  // the peer's
  std::uint64_t landing_key_ = 0;
  std::uint64_t next_sequence_ = 1;
  std::size_t in_flight_ = 0;
  std::uint64_t refused_since_ns_ = 0;
  std::uint64_t refused_last_ns_ = 0;  // 0: not since something was taken
  bool joining_ = false;
  bool joined_ = false;
  bool shutting_ = false;
  bool closing_ = false;
  std::uint64_t stop_by_ns_ = 0;
  mutable bool told_ = false;  // the peer knows our endpoint
  bool may_greet_ = false;
  bool greeted_ = false;  // the peer was, by us
  bool greeting_arrived_ = false;
  bool heard_ = false;          // its greeting
  Flushes::EntryPtr flushes_;   // from the greeting on; null where keys fence
  std::uint64_t flushing_ = 0;  // the flush under way; 0: none
  std::uint64_t flushed_ = 0;
  Connected then_connected_;
  std::function<void()> then_shut_;
};

}  // namespace kvxfer::ofi
