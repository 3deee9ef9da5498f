// A path that is joined by hand: what takes its NIC a while has happened when a call returns.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "fabric/nic/nic_domain.hpp"

namespace kvxfer::test {

class BarePath {
 public:
  // Drives the NICs until it is so.
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
