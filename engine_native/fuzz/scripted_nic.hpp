// A NIC that a fuzzer drives: its paths finish, break and count when they are told to.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fabric/nic/nic_domain.hpp"

namespace kvxfer::fuzz {

class ScriptedPath;

class ScriptedNic final : public NicDomain {
 public:
  ScriptedNic(std::string name, bool windows, ReceiveContext receive_context, NicEvents& events);

  std::string_view fabric() const override { return "scripted"; }
  void poll() override {}
  bool prepare_sleep() override { return true; }
  void finish_sleep() override {}
  const NicInfo& info() const override { return info_; }
  bool usable() const override { return up; }
  bool keeps_order() const override { return false; }
  bool keeps_arrivals() const override { return windows_; }
  std::uint64_t max_window() const override { return windows_ ? UINT64_MAX : 0; }
  Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion& region) override;
  void open_path(NicPathIdentity identity, Opened then) override;

  bool up = true;
  bool refuses = false;  // refuses to open paths
  bool slow = false;     // opening, connecting and shutting paths waits for catch_up()
  void catch_up();
  std::vector<ScriptedPath*> paths;

 private:
  friend class ScriptedPath;
  void soon(std::function<void()> then);

  std::vector<std::function<void()>> later_;
  NicInfo info_;
  bool windows_;
  ReceiveContext receive_context_;
  NicEvents& events_;
  NicLoad load_{.bits_per_second = 1'000'000'000};
};

class ScriptedPath final : public NicPath {
 public:
  ScriptedPath(NicPathIdentity identity, ScriptedNic& nic);
  ~ScriptedPath() override;

  std::string_view fabric() const override { return "scripted"; }
  std::string endpoint() const override;
  // Takes an endpoint of the verbs fabric, if that is built: its decoder reads the peer's bytes.
  void connect(std::string_view endpoint, Connected then) override;
  std::size_t post(const OperationPtr& operation, const WriteRange& writes) override;
  void shut(std::function<void()> then) override;
  bool open_window(const MemoryRegion& grant) override;
  void close_window(std::uint64_t grant) override { windows_.erase(grant); }
  bool has_windows_of(const MemoryRegion&) const override { return !windows_.empty(); }
  std::optional<RemoteKey> window(std::uint64_t grant) const override;

  // Reports of the NIC.
  void complete() { finish(++completed_); }
  void arrive(Imm imm, std::uint64_t writes) { count_immediates(imm, writes); }
  void break_down() { lose({Errc::nic_lost, "broken"}); }
  void open_windows();

 private:
  ScriptedNic& nic_;
  std::uint64_t completed_ = 0;
  bool shut_ = false;
  Connected then_connected_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  std::map<std::uint64_t, RemoteKey> windows_;  // keyed by grant; valid once open
};

}  // namespace kvxfer::fuzz
