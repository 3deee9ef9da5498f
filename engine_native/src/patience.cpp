#include "patience.hpp"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "fd.hpp"

namespace kvxfer {
namespace {

// Half of the time for which silences are remembered.
constexpr std::uint64_t kHalfNs = 30'000'000'000u;

// Reads a thread's /proc/…/stat: "tid (name) S …". Returns empty values if it is malformed.
std::pair<std::string_view, char> name_and_state(std::string_view stat) {
  const auto open = stat.find('(');
  const auto close = stat.rfind(") ");
  if (open == std::string_view::npos || close == std::string_view::npos || close < open) return {};
  return {stat.substr(open + 1, close - open - 1),
          close + 2 < stat.size() ? stat[close + 2] : '\0'};
}

}  // namespace

EngineThreads engine_threads_of(pid_t pid) {
  if (pid <= 0) return EngineThreads::unknown;
  const std::string tasks = "/proc/" + std::to_string(pid) + "/task";
  auto found = EngineThreads::unknown;
  std::error_code none;  // set if the process has ended or is hidden
  for (std::filesystem::directory_iterator task(tasks, none), end; !none && task != end;
       task.increment(none)) {
    const UniqueFd file(::open((task->path() / "stat").c_str(), O_RDONLY | O_CLOEXEC));
    std::array<char, 128> start;  // the name and the state are in it
    const auto size = file ? ::read(file.get(), start.data(), start.size()) : 0;
    if (size <= 0) continue;
    const auto [name, state] = name_and_state({start.data(), static_cast<std::size_t>(size)});
    if (name != kEngineThreadName) continue;
    if (state == 'R') return EngineThreads::want_core;
    if (state == 'T' || state == 't') found = EngineThreads::stopped;
  }
  return found;
}

void Patience::hear(std::uint64_t at_ns) {
  if (at_ns <= heard_ns_) return;
  if (at_ns - half_began_ns_ > kHalfNs) {
    before_ns_ = at_ns - half_began_ns_ > 2 * kHalfNs ? 0 : longest_ns_;
    longest_ns_ = 0;
    half_began_ns_ = at_ns;
  }
  longest_ns_ = std::max(longest_ns_, at_ns - heard_ns_);
  heard_ns_ = at_ns;
}

void Patience::forgive(std::uint64_t stalled_ns, std::uint64_t now) {
  heard_ns_ = std::min(now, heard_ns_ + stalled_ns);
}

bool Patience::ends(std::uint64_t limit_ns, pid_t pid, std::uint64_t now) const {
  const auto silent = silence(now);
  if (silent <= limit_ns) return false;
  if (silent > kMostLimits * limit_ns) return true;
  switch (engine_threads_of(pid)) {
    case EngineThreads::stopped:
      return true;
    case EngineThreads::want_core:
      return false;
    case EngineThreads::unknown:
      return silent > 2 * longest_ns();
  }
  return true;
}

}  // namespace kvxfer
