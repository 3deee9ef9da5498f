// EngineOptions.
#include "bindings.hpp"

namespace py = pybind11;

namespace kvxfer::python {
namespace {

FabricUse fabric_use(const std::string& use) {
  if (use == "required") return FabricUse::required;
  return use == "if_available" ? FabricUse::if_available : FabricUse::never;
}

EngineOptions make_options(const py::bytes& cluster_key, const std::string& name,
                           const std::string& host, const std::string& advertise,
                           std::uint16_t port, bool local, bool tcp, const std::string& verbs,
                           const std::string& ofi, bool null, const std::vector<std::string>& nics,
                           int traffic_class, int service_level, const std::string& ofi_provider,
                           unsigned ofi_endpoints, bool ofi_strict,
                           const std::vector<unsigned>& cpus, unsigned lanes,
                           std::size_t window_bytes, double heartbeat_interval, double peer_timeout,
                           double operation_timeout, double spin) {
  EngineOptions options;
  options.cluster_key = cluster_key;
  options.name = name;
  options.host = host;
  options.advertise = advertise;
  options.port = port;
  options.local = local;
  options.tcp = tcp;
  options.verbs = fabric_use(verbs);
  options.ofi = fabric_use(ofi);
  options.null = null;
  options.nics = nics;
  options.traffic_class = traffic_class;
  options.service_level = service_level;
  options.ofi_provider = ofi_provider;
  options.ofi_endpoints = ofi_endpoints;
  options.ofi_strict = ofi_strict;
  options.cpus = cpus;
  options.lanes = lanes;
  options.window_bytes = window_bytes;
  options.heartbeat_interval = seconds(heartbeat_interval);
  options.peer_timeout = seconds(peer_timeout);
  options.operation_timeout = seconds(operation_timeout);
  options.spin = seconds(spin);
  return options;
}

}  // namespace

void bind_options(py::module_& module) {
  py::class_<EngineOptions>(module, "EngineOptions")
      .def(py::init(&make_options), py::kw_only(), py::arg("cluster_key"), py::arg("name"),
           py::arg("host"), py::arg("advertise"), py::arg("port"), py::arg("local"), py::arg("tcp"),
           py::arg("verbs"), py::arg("ofi"), py::arg("null"), py::arg("nics"),
           py::arg("traffic_class"), py::arg("service_level"), py::arg("ofi_provider"),
           py::arg("ofi_endpoints"), py::arg("ofi_strict"), py::arg("cpus"), py::arg("lanes"),
           py::arg("window_bytes"), py::arg("heartbeat_interval"), py::arg("peer_timeout"),
           py::arg("operation_timeout"), py::arg("spin"));
}

}  // namespace kvxfer::python
