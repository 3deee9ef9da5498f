// A path over libfabric: a pair of endpoints, one of them ours.
//
// It carries writes once each end has received a greeting from the other, and knows that its
// greeting has arrived. A greeting is a write to the other's landing, with an immediate that no
// counter has. The initiator greets first. So an open path works in both directions.
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

// The most writes under way on one path.
inline constexpr std::size_t kMaxWritesOfPath = 1024;
// The most immediates of a path's peer under way: with 4 KiB each they fill a link of 200 Gbit/s
// for 160 us, in which credit comes back over the control stream.
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

  // Loses the path, because the NIC is down.
  void fail(Error error) { on_failed(std::move(error)); }
  // Takes completions, and posts a greeting or a flush that is due.
  void poll();
  // Returns null once the endpoint is being closed.
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
  // Handles the result of posting a write. Returns true if it was posted.
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
  std::uint64_t refused_last_ns_ = 0;  // 0: none since a write was taken
  bool joining_ = false;
  bool joined_ = false;
  bool shutting_ = false;
  bool closing_ = false;
  std::uint64_t stop_by_ns_ = 0;
  mutable bool told_ = false;  // the peer knows our endpoint
  bool may_greet_ = false;
  bool greeted_ = false;  // we have greeted the peer
  bool greeting_arrived_ = false;
  bool heard_ = false;          // the peer's greeting has come
  Flushes::EntryPtr flushes_;   // set from the greeting on; null if keys fence
  std::uint64_t flushing_ = 0;  // the flush under way; 0: none
  std::uint64_t flushed_ = 0;
  Connected then_connected_;
  std::function<void()> then_shut_;
};

}  // namespace kvxfer::ofi
