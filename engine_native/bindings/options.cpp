// EngineOptions from keyword arguments. An option needs one line of kOptions here.
#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <type_traits>

#include "bindings.hpp"
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

void read(const Given& given, FabricUse& into) {
  const std::string choices = "'never', 'if_available' or 'required'";
  const auto use = cast<std::string>(given, choices);
  if (use == "never") {
    into = FabricUse::never;
  } else if (use == "if_available") {
    into = FabricUse::if_available;
  } else if (use == "required") {
    into = FabricUse::required;
  } else {
    refuse(given, py::repr(given.value), choices);
  }
}

void read(const Given& given, std::shared_ptr<NicFactory>& into) {
  into = cast<std::shared_ptr<NicFactory>>(given, "what null_nics() returns");
}

template <auto Member>
void set(EngineOptions& options, const Given& given) {
  read(given, options.*Member);
}

template <auto Member>
void set_or_none(EngineOptions& options, const Given& given) {
  if (!given.value.is_none()) read(given, options.*Member);
}

// Sets a secret, which no error text shows.
template <auto Member>
void set_secret(EngineOptions& options, const Given& given) {
  try {
    options.*Member = given.value.cast<std::string>();
  } catch (const py::cast_error&) {
    refuse(given, "neither bytes nor text", "bytes or a str");
  }
}

struct Option {
  std::string_view name;
  void (*set)(EngineOptions&, const Given&);
};

constexpr auto kOptions = std::to_array<Option>({
    {"cluster_key", set_secret<&EngineOptions::cluster_key>},
    {"name", set<&EngineOptions::name>},
    {"host", set<&EngineOptions::host>},
    {"advertise", set_or_none<&EngineOptions::advertise>},
    {"port", set<&EngineOptions::port>},
    {"local", set<&EngineOptions::local>},
    {"tcp", set<&EngineOptions::tcp>},
    {"verbs", set<&EngineOptions::verbs>},
    {"ofi", set<&EngineOptions::ofi>},
    {"nics", set<&EngineOptions::nics>},
    {"traffic_class", set<&EngineOptions::traffic_class>},
    {"service_level", set<&EngineOptions::service_level>},
    {"gid_index", set<&EngineOptions::gid_index>},
    {"pkey", set<&EngineOptions::pkey>},
    {"path_mtu", set<&EngineOptions::path_mtu>},
    {"memory_windows", set<&EngineOptions::memory_windows>},
    {"paths_per_nic_pair", set<&EngineOptions::paths_per_nic_pair>},
    {"ofi_provider", set<&EngineOptions::ofi_provider>},
    {"ofi_endpoints", set<&EngineOptions::ofi_endpoints>},
    {"ofi_strict", set<&EngineOptions::ofi_strict>},
    {"thread", set<&EngineOptions::thread>},
    {"cpus", set<&EngineOptions::cpus>},
    {"more_nics", set_or_none<&EngineOptions::more_nics>},
    {"lanes", set<&EngineOptions::lanes>},
    {"window_bytes", set<&EngineOptions::window_bytes>},
    {"heartbeat_interval", set<&EngineOptions::heartbeat_interval>},
    {"peer_timeout", set<&EngineOptions::peer_timeout>},
    {"path_timeout", set<&EngineOptions::path_timeout>},
    {"operation_timeout", set<&EngineOptions::operation_timeout>},
    {"spin", set<&EngineOptions::spin>},
});

EngineOptions make_options(const py::kwargs& arguments) {
  EngineOptions options;
  for (const auto& [key, value] : arguments) {
    const Given given{.name = key.cast<std::string>(), .value = value};
    const auto* option = std::ranges::find(kOptions, given.name, &Option::name);
    if (option == kOptions.end()) {
      throw py::type_error("EngineOptions() got an unexpected keyword argument '" + given.name +
                           "'");
    }
    option->set(options, given);
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
  py::tuple names(kOptions.size());
  for (std::size_t i = 0; i < kOptions.size(); ++i) names[i] = kOptions[i].name;
  module.attr("OPTION_NAMES") = names;
  module.attr("DEFAULT_PEER_TIMEOUT") =
      std::chrono::duration<double>(EngineOptions{}.peer_timeout).count();
}

}  // namespace kvxfer::python
