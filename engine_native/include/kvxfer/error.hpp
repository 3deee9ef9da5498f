// Errors are values: a code that is stable across releases and a text that names the peer, the
// operation and the cause. Nothing in the engine throws across its public interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace kvxfer {

enum class Errc : std::uint16_t {
  ok = 0,
  invalid_argument,
  engine_closed,
  address_in_use,
  out_of_memory,
  unknown_region,
  out_of_bounds,
  stale_counter,
  cancelled,
  deadline_exceeded,
  backpressure,
  message_too_large,
  permission_denied,
  gpu_lost,
  connect_failed,
  authentication_failed,
  peer_restarted,
  peer_lost,
  peer_timeout,
  protocol_error,
  fabric_unavailable,
  nic_lost,
};
inline constexpr std::size_t kErrcs = static_cast<std::size_t>(Errc::nic_lost) + 1;

// Returns the code's public name, e.g. "peer-timeout"; the same in Python, REST and metrics.
std::string_view name(Errc code);

struct Error {
  Errc code = Errc::ok;
  std::string text;
};

// A value or an Error (std::expected is C++23).
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}
  Result(Error error) : state_(std::move(error)) {}

  explicit operator bool() const { return state_.index() == 0; }
  T& operator*() { return std::get<0>(state_); }
  const T& operator*() const { return std::get<0>(state_); }
  T* operator->() { return &std::get<0>(state_); }
  const T* operator->() const { return &std::get<0>(state_); }
  const Error& error() const { return std::get<1>(state_); }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}

  explicit operator bool() const { return !error_; }
  const Error& error() const { return *error_; }

 private:
  std::optional<Error> error_;
};

}  // namespace kvxfer
