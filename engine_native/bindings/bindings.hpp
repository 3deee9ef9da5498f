// Declarations that the files of the binding share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvxfer/engine.hpp"

namespace kvxfer::python {

using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// Becomes kvxfer._native.Error(code, message); kvxfer.engine turns it into the public classes.
struct NativeError : std::exception {
  explicit NativeError(Error cause) : error(std::move(cause)) {}
  const char* what() const noexcept override { return error.text.c_str(); }
  Error error;
};

template <class T>
T unwrap(Result<T> result) {
  if (!result) throw NativeError(result.error());
  return std::move(*result);
}
inline void unwrap(const Result<void>& result) {
  if (!result) throw NativeError(result.error());
}

// `what` begins the error text.
inline Duration seconds(double value, std::string_view what = "a time of") {
  if (!(value >= 0 && value < 1e9)) {
    throw NativeError({Errc::invalid_argument, std::string(what) + " " + std::to_string(value) +
                                                   " s; pass 0 to 1e9 seconds"});
  }
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(value));
}

pybind11::object to_text(const std::string& text);
pybind11::list to_list(const std::vector<Completion>& completions);

// Binds an object that belongs to the process that created it: in a forked process its methods
// raise the error of T::require_own_process().
template <class T>
class Owned : public pybind11::class_<T> {
 public:
  using Base = pybind11::class_<T>;
  using Base::Base;

  template <class Call, class... Extra>
  Owned& def(const char* name, Call&& call, const Extra&... extra) {
    Base::def(name, checked(std::forward<Call>(call)), extra...);
    return *this;
  }
  // Binds a method that ends something, which a forked process may call.
  template <class Call, class... Extra>
  Owned& def_end(const char* name, Call&& call, const Extra&... extra) {
    Base::def(name, std::forward<Call>(call), extra...);
    return *this;
  }
  template <class Call>
  Owned& def_property_readonly(const char* name, Call&& call) {
    Base::def_property_readonly(name, std::forward<Call>(call));
    return *this;
  }

 private:
  template <class Return, class... Args>
  static auto checked(Return (T::*call)(Args...)) {
    return [call](T& of, Args... args) -> Return {
      unwrap(of.require_own_process());
      return (of.*call)(std::forward<Args>(args)...);
    };
  }
  template <class Return, class... Args>
  static auto checked(Return (T::*call)(Args...) const) {
    return [call](const T& of, Args... args) -> Return {
      unwrap(of.require_own_process());
      return (of.*call)(std::forward<Args>(args)...);
    };
  }
  template <class Call>
  static auto checked(Call&& call) {
    using Signature = pybind11::detail::function_signature_t<Call>;
    return checked(std::forward<Call>(call), static_cast<Signature*>(nullptr));
  }
  template <class Call, class Return, class Of, class... Args>
  static auto checked(Call&& call, Return (*)(Of, Args...)) {
    return [call = std::forward<Call>(call)](Of of, Args... args) -> Return {
      unwrap(of.require_own_process());
      return call(of, std::forward<Args>(args)...);
    };
  }
};

using EngineClass = Owned<TransferEngine>;

void bind_options(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
EngineClass bind_engine(pybind11::module_& module);
void bind_writes(pybind11::module_& module, EngineClass& bound);
void bind_completions(EngineClass& bound);
void bind_moe(pybind11::module_& module);

}  // namespace kvxfer::python
