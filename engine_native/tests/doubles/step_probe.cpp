#include "doubles/step_probe.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <string>
#include <string_view>
#include <utility>

#include "clock.hpp"
#include "fd.hpp"

namespace kvxfer::test {
namespace {

Error no_path() { return {Errc::nic_lost, "this NIC carries nothing"}; }

struct NoAccess final : NicRegistration {
  Result<RemoteKey> share(PeerId) override { return no_path(); }
  void unshare(PeerId) override {}
  Result<void> close() override { return {}; }
};

class Timer final : public NicDomain {
 public:
  Timer(StepProbe::HeldUpNs held_up, std::shared_ptr<std::atomic<std::uint64_t>> longest_ns)
      : held_up_(held_up),
        longest_ns_(std::move(longest_ns)),
        info_{.name = "timer", .network = network()} {}

  std::string_view fabric() const override { return "timer"; }
  const NicInfo& info() const override { return info_; }
  bool usable() const override { return false; }
  bool keeps_order() const override { return true; }
  Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion&) override {
    return std::shared_ptr<NicRegistration>(std::make_shared<NoAccess>());
  }
  void open_path(NicPathIdentity, Opened then) override { then(no_path()); }

  void poll() override {
    const std::uint64_t now = time();
    if (since_ != 0) *longest_ns_ = std::max(longest_ns_->load(), now - std::min(now, since_));
    since_ = now;
  }
  bool prepare_sleep() override {
    poll();
    return true;
  }
  void finish_sleep() override { since_ = time(); }

 private:
  // A network that no peer has.
  static std::string network() {
    static std::atomic<unsigned> made = 0;
    return "timer " + std::to_string(++made);
  }
  std::uint64_t time() const { return thread_time_ns() - held_up_(); }

  StepProbe::HeldUpNs held_up_;
  std::shared_ptr<std::atomic<std::uint64_t>> longest_ns_;
  NicInfo info_;
  std::uint64_t since_ = 0;
};

}  // namespace

std::uint64_t thread_time_ns() {
  thread_local const UniqueFd schedstat{::open("/proc/thread-self/schedstat", O_RDONLY)};
  std::array<char, 96> text{};
  const ssize_t size = ::pread(schedstat.get(), text.data(), text.size(), 0);
  const std::uint64_t now = now_ns();
  // "ran waited slices": two times in nanoseconds, and a count.
  const std::string_view all(text.data(), size > 0 ? static_cast<std::size_t>(size) : 0);
  const auto space = all.find(' ');
  std::uint64_t waited = 0;
  if (space != std::string_view::npos) {
    std::from_chars(all.data() + space + 1, all.data() + all.size(), waited);
  }
  return now - waited;
}

Result<OpenedNics> StepProbe::open(const NicContext& context) {
  auto opened = others_->open(context);
  if (opened) opened->nics.push_back(std::make_unique<Timer>(held_up_, longest_ns_));
  return opened;
}

}  // namespace kvxfer::test
