// EngineOptions from keyword arguments; `tuning` is a dict. An option needs one line of kOptions
// here.
#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <type_traits>

#include "bindings.hpp"
#include "engine_options.hpp"
#include "fabric/null/null_domain.hpp"

namespace py = pybind11;

namespace kvxfer::python {
namespace {

// One argument, as Python gave it.
struct Given {
  std::string name;
  py::handle value;
};

[[noreturn]] void refuse(const Given& given, const std::string& is, const std::string& takes) {
  throw NativeError({Errc::invalid_argument, given.name + " is " + is + "; pass " + takes});
}

// Describes what a C++ type takes, in Python's words.
template <class T>
std::string takes() {
  if constexpr (std::is_same_v<T, bool>) {
    return "True or False";
  } else if constexpr (std::is_integral_v<T>) {
    using Limits = std::numeric_limits<T>;
    return "an int from " + std::to_string(Limits::min()) + " to " + std::to_string(Limits::max());
  } else if constexpr (std::is_same_v<T, std::string>) {
    return "a str";
  } else {
    return "a list, each item " + takes<typename T::value_type>();
  }
}

template <class T>
T cast(const Given& given, const std::string& takes) {
  try {
    return given.value.cast<T>();
  } catch (const py::cast_error&) {
    refuse(given, py::repr(given.value), takes);
  }
}

template <class T>
void read(const Given& given, T& into) {
  into = cast<T>(given, takes<T>());
}

void read(const Given& given, Duration& into) {
  into = seconds(cast<double>(given, "a number of seconds"), given.name + " is");
}

// By the number of FabricUse.
constexpr auto kUses = std::to_array<std::string_view>({"never", "if_available", "required"});

void read(const Given& given, FabricUse& into) {
  const std::string choices = "'never', 'if_available' or 'required'";
  const auto* use = std::ranges::find(kUses, cast<std::string>(given, choices));
  if (use == kUses.end()) refuse(given, py::repr(given.value), choices);
  into = static_cast<FabricUse>(use - kUses.begin());
}

void read(const Given& given, std::shared_ptr<NicFactory>& into) {
  into = cast<std::shared_ptr<NicFactory>>(given, "what null_nics() returns");
}

template <class T>
T& at(EngineOptions& options, T EngineOptions::* member) {
  return options.*member;
}

template <class T>
T& at(EngineOptions& options, T EngineTuning::* member) {
  return options.tuning.*member;
}

template <auto Member>
void set(EngineOptions& options, const Given& given) {
  read(given, at(options, Member));
}

template <auto Member>
void set_or_none(EngineOptions& options, const Given& given) {
  if (!given.value.is_none()) read(given, at(options, Member));
}

// Sets a secret, which no error text shows.
template <auto Member>
void set_secret(EngineOptions& options, const Given& given) {
  try {
    at(options, Member) = given.value.cast<std::string>();
  } catch (const py::cast_error&) {
    refuse(given, "neither bytes nor text", "bytes or a str");
  }
}

template <auto Member>
py::object get(EngineOptions& options) {
  const auto& value = at(options, Member);
  if constexpr (std::is_same_v<decltype(value), const Duration&>) {
    return py::float_(std::chrono::duration<double>(value).count());
  } else if constexpr (std::is_same_v<decltype(value), const FabricUse&>) {
    return py::cast(std::string(kUses.at(static_cast<std::size_t>(value))));
  } else {
    return py::cast(value);
  }
}

struct Option {
  std::string_view name;
  void (*set)(EngineOptions&, const Given&);
  py::object (*get)(EngineOptions&);
};

template <auto Member>
constexpr Option entry(std::string_view name,
                       void (*set_it)(EngineOptions&, const Given&) = set<Member>) {
  return {name, set_it, get<Member>};
}

using Options = EngineOptions;
using Tuning = EngineTuning;

constexpr auto kOptions = std::to_array<Option>({
    entry<&Options::cluster_key>("cluster_key", set_secret<&Options::cluster_key>),
    entry<&Options::name>("name"),
    entry<&Options::host>("host"),
    entry<&Options::advertise>("advertise", set_or_none<&Options::advertise>),
    entry<&Options::port>("port"),
    entry<&Options::local>("local"),
    entry<&Options::tcp>("tcp"),
    entry<&Options::verbs>("verbs"),
    entry<&Options::ofi>("ofi"),
    entry<&Options::nics>("nics"),
    entry<&Options::traffic_class>("traffic_class"),
    entry<&Options::gid_index>("gid_index"),
    entry<&Options::pkey>("pkey"),
    entry<&Options::ofi_provider>("ofi_provider"),
    entry<&Options::ofi_strict>("ofi_strict"),
    entry<&Options::thread>("thread"),
    entry<&Options::cpus>("cpus"),
    entry<&Options::more_nics>("more_nics", set_or_none<&Options::more_nics>),
    entry<&Options::peer_timeout>("peer_timeout"),
    entry<&Options::operation_timeout>("operation_timeout"),
    entry<&Tuning::lanes>("tuning.lanes"),
    entry<&Tuning::window_bytes>("tuning.window_bytes"),
    entry<&Tuning::heartbeat_interval>("tuning.heartbeat_interval"),
    entry<&Tuning::path_timeout>("tuning.path_timeout"),
    entry<&Tuning::spin>("tuning.spin"),
    entry<&Tuning::service_level>("tuning.service_level"),
    entry<&Tuning::path_mtu>("tuning.path_mtu"),
    entry<&Tuning::memory_windows>("tuning.memory_windows"),
    entry<&Tuning::paths_per_nic_pair>("tuning.paths_per_nic_pair"),
    entry<&Tuning::ofi_endpoints>("tuning.ofi_endpoints"),
});

void set_option(EngineOptions& options, const Given& given) {
  const auto* option = std::ranges::find(kOptions, given.name, &Option::name);
  if (option == kOptions.end()) {
    throw py::type_error("EngineOptions() got an unexpected keyword argument '" + given.name + "'");
  }
  option->set(options, given);
}

EngineOptions make_options(const py::kwargs& arguments) {
  EngineOptions options;
  for (const auto& [key, value] : arguments) {
    const Given given{.name = key.cast<std::string>(), .value = value};
    if (given.name != "tuning") {
      set_option(options, given);
      continue;
    }
    for (const auto& [name, of_it] : cast<py::dict>(given, "a dict")) {
      set_option(options, {.name = "tuning." + name.cast<std::string>(), .value = of_it});
    }
  }
  return options;
}

// The default, the least, the most and the unit of each option, by name. The bounds are None if it
// has none.
py::dict described() {
  EngineOptions defaults;
  py::dict options;
  for (const Option& option : kOptions) {
    const auto bounds = std::ranges::find(option_bounds(), option.name, &OptionBounds::name);
    const py::str name(option.name.data(), option.name.size());
    if (bounds == option_bounds().end()) {
      options[name] = py::make_tuple(option.get(defaults), py::none(), py::none(), "");
    } else {
      options[name] =
          py::make_tuple(option.get(defaults), bounds->least, bounds->most, bounds->unit);
    }
  }
  return options;
}

}  // namespace

void bind_options(py::module_& module) {
  py::class_<NicFactory, std::shared_ptr<NicFactory>>(module, "NicFactory");
  module.def(
      "null_nics",
      [](bool keeps_order) -> std::shared_ptr<NicFactory> {
        return std::make_shared<null::NullFactory>(keeps_order);
      },
      py::kw_only(), py::arg("keeps_order"));
  py::class_<EngineOptions>(module, "EngineOptions").def(py::init(&make_options));
  module.attr("ENGINE_OPTIONS") = described();
}

}  // namespace kvxfer::python
