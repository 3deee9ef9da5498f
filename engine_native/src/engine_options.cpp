#include "engine_options.hpp"

#include <array>
#include <charconv>
#include <chrono>
#include <limits>
#include <string>
#include <type_traits>

#include "bootstrap/handshake.hpp"
#include "operation.hpp"

namespace kvxfer {
namespace {

template <class T>
double number(const T& value) {
  if constexpr (std::is_same_v<T, Duration>) {
    return std::chrono::duration<double>(value).count();
  } else if constexpr (std::is_same_v<T, std::string>) {
    return static_cast<double>(value.size());
  } else {
    return static_cast<double>(value);
  }
}

template <auto Member>
double value_of(const EngineOptions& options) {
  if constexpr (std::is_invocable_v<decltype(Member), const EngineTuning&>) {
    return number(options.tuning.*Member);
  } else {
    return number(options.*Member);
  }
}

using Options = EngineOptions;
using Tuning = EngineTuning;
constexpr double kUnbounded = std::numeric_limits<double>::infinity();
constexpr double kLeastHeartbeat = 0.001;
constexpr double kNanosecond = 1e-9;  // the unit of Duration

constexpr auto kBounds = std::to_array<OptionBounds>({
    {"name", value_of<&Options::name>, 0, kMaxNameBytes, "bytes"},
    {"port", value_of<&Options::port>, 0, 0xffff, ""},
    {"traffic_class", value_of<&Options::traffic_class>, 0, 255, ""},
    {"gid_index", value_of<&Options::gid_index>, 0, 255, ""},
    {"pkey", value_of<&Options::pkey>, 1, 0xffff, ""},
    {"peer_timeout", value_of<&Options::peer_timeout>, 2 * kLeastHeartbeat, kUnbounded, "s"},
    {"operation_timeout", value_of<&Options::operation_timeout>, kNanosecond, kUnbounded, "s"},
    {"tuning.lanes", value_of<&Tuning::lanes>, 1, kMaxLanes, ""},
    {"tuning.window_bytes", value_of<&Tuning::window_bytes>, kMaxWriteBytes, kUnbounded, "bytes"},
    {"tuning.heartbeat_interval", value_of<&Tuning::heartbeat_interval>, kLeastHeartbeat,
     kMaxHeartbeatNs / 1e9, "s"},
    {"tuning.path_timeout", value_of<&Tuning::path_timeout>, kLeastHeartbeat, kUnbounded, "s"},
    {"tuning.spin", value_of<&Tuning::spin>, 0, kUnbounded, "s"},
    {"tuning.service_level", value_of<&Tuning::service_level>, 0, 7, ""},
    {"tuning.path_mtu", value_of<&Tuning::path_mtu>, 256, 4096, "bytes"},
    {"tuning.paths_per_nic_pair", value_of<&Tuning::paths_per_nic_pair>, 1, 8, ""},
    {"tuning.ofi_endpoints", value_of<&Tuning::ofi_endpoints>, 1, kMaxNics, ""},
});

std::string text_of(double value, std::string_view unit = "") {
  std::array<char, 32> digits{};
  std::string text(digits.begin(), std::to_chars(digits.begin(), digits.end(), value).ptr);
  if (!unit.empty()) text.append(" ").append(unit);
  return text;
}

// Describes the valid values: "1 to 64", "1048576 bytes or more", "0 to 255, or -1".
std::string valid(const OptionBounds& bounds) {
  std::string text = bounds.most == kUnbounded
                         ? text_of(bounds.least, bounds.unit) + " or more"
                         : text_of(bounds.least) + " to " + text_of(bounds.most, bounds.unit);
  const double standard = bounds.value({});
  if (standard < bounds.least) text += ", or " + text_of(standard);
  return text;
}

Result<void> check(const OptionBounds& bounds, const EngineOptions& options) {
  const double value = bounds.value(options);
  if ((value >= bounds.least && value <= bounds.most) || value == bounds.value({})) return {};
  return Error{Errc::invalid_argument, std::string(bounds.name) + " is " +
                                           text_of(value, bounds.unit) + "; use " + valid(bounds)};
}

}  // namespace

std::span<const OptionBounds> option_bounds() { return kBounds; }

Result<void> check_options(const EngineOptions& options) {
  const auto bad = [](const std::string& what) { return Error{Errc::invalid_argument, what}; };
  if (options.cluster_key.size() < kMinClusterKeyBytes) {
    return bad("cluster_key has " + std::to_string(options.cluster_key.size()) +
               " bytes; it needs at least " + std::to_string(kMinClusterKeyBytes) +
               ", e.g. the output of: openssl rand -hex 32");
  }
  const bool nics =
      options.verbs != FabricUse::never || options.ofi != FabricUse::never || options.more_nics;
  if (!options.local && !options.tcp && !nics) {
    return bad("no fabric is enabled; enable at least one of local, verbs, ofi and tcp");
  }
  for (const OptionBounds& bounds : kBounds) {
    if (auto good = check(bounds, options); !good) return good;
  }
  const EngineTuning& tuning = options.tuning;
  if (options.peer_timeout < 2 * tuning.heartbeat_interval) {
    return bad("peer_timeout must be at least twice tuning.heartbeat_interval");
  }
  if (tuning.path_timeout < tuning.heartbeat_interval) {
    return bad(
        "tuning.path_timeout must be at least tuning.heartbeat_interval, at which it is checked");
  }
  if (!options.thread && !options.cpus.empty()) {
    return bad("cpus says where the engine thread runs, and this engine has none; leave cpus out");
  }
  return {};
}

}  // namespace kvxfer
