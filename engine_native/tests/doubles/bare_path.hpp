// A path that is joined by hand. Its calls return once the NIC has done what takes it a while.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fabric/nic/nic_domain.hpp"

namespace kvxfer::test {

// An operation of `pieces` neighbouring writes. `destination` has the keys by our NIC numbers.
inline OperationPtr operation_of(const RegionPtr& source, std::vector<RemoteKey> destination,
                                 std::size_t pieces, std::uint32_t piece_bytes,
                                 std::optional<Imm> imm) {
  auto submission = std::make_shared<Submission>();
  Operation& made = submission->parts.emplace_back();
  made.source = source;
  made.imm = imm;
  for (std::size_t i = 0; i < pieces; ++i) {
    submission->writes.push_back({i * piece_bytes, i * piece_bytes, piece_bytes});
  }
  made.writes = submission->writes;
  made.bytes = pieces * piece_bytes;
  auto remote = std::make_shared<RemoteRegion>();
  remote->keys = std::move(destination);
  made.destination = remote;
  return {submission, made};
}

class BarePath {
 public:
  // Drives the NICs until the condition is true.
  using Until = std::function<void(const std::function<bool()>&)>;

  static Result<BarePath> open(NicDomain& nic, NicPathIdentity identity, Until until) {
    std::optional<Result<std::unique_ptr<NicPath>>> opened;
    nic.open_path(std::move(identity), [&](auto path) { opened = std::move(path); });
    until([&] { return opened.has_value(); });
    if (!*opened) return opened->error();
    return BarePath(std::move(**opened), std::move(until));
  }
  BarePath() = default;
  BarePath(BarePath&&) = default;
  BarePath& operator=(BarePath&& other) noexcept {
    shut();
    path_ = std::move(other.path_);
    shut_ = other.shut_;
    until_ = std::move(other.until_);
    return *this;
  }
  ~BarePath() { shut(); }

  Result<void> connect(const std::string& endpoint) {
    std::optional<Result<void>> connected;
    path_->connect(endpoint, [&](const Result<void>& good) { connected = good; });
    until_([&] { return connected.has_value(); });
    return *connected;
  }
  // Idempotent.
  void shut() {
    if (!path_ || std::exchange(shut_, true)) return;
    bool done = false;
    path_->shut([&] { done = true; });
    until_([&] { return done; });
  }

  NicPath* get() const { return path_.get(); }
  NicPath& operator*() const { return *path_; }
  NicPath* operator->() const { return path_.get(); }

 private:
  BarePath(std::unique_ptr<NicPath> path, Until until)
      : path_(std::move(path)), until_(std::move(until)) {}

  std::unique_ptr<NicPath> path_;
  bool shut_ = false;
  Until until_;
};

}  // namespace kvxfer::test
