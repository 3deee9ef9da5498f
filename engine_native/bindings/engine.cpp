// The engine: its life cycle, memory and peers.
#include "bindings.hpp"
#include "memory_region.hpp"

namespace py = pybind11;

namespace kvxfer::python {
namespace {

py::dict by_name(const Refusals& refusals) {
  py::dict counts;
  for (std::size_t code = 0; code < kErrcs; ++code) {
    if (refusals.by_code[code] == 0) continue;
    counts[py::str(std::string(name(static_cast<Errc>(code))))] = refusals.by_code[code];
  }
  return counts;
}

}  // namespace

EngineClass bind_engine(py::module_& module) {
  EngineClass bound(module, "TransferEngine");
  static_cast<EngineClass::Base&>(bound).def(py::init([](const EngineOptions& options) {
                                               py::gil_scoped_release release;
                                               return unwrap(TransferEngine::create(options));
                                             }),
                                             py::arg("options"));
  bound.def_end("close", &TransferEngine::close, NoGil())
      .def("poll", &TransferEngine::poll, NoGil())
      .def_property_readonly("address",
                             [](const TransferEngine& engine) { return engine.address().text(); })
      .def_property_readonly(
          "engine_id", [](const TransferEngine& engine) { return engine.address().engine.hex(); })
      .def_property_readonly("fabrics", &TransferEngine::fabrics)
      .def_property_readonly(
          "nics",
          [](const TransferEngine& engine) {
            py::list nics;
            for (const NicInfo& nic : engine.nics()) {
              nics.append(py::make_tuple(nic.name, nic.network, nic.bits_per_second));
            }
            return nics;
          })
      .def("stats",
           [](const TransferEngine& engine) {
             EngineStats s;
             {
               py::gil_scoped_release release;
               s = engine.stats();
             }
             py::dict stats;
             stats["bytes_sent"] = s.bytes_sent;
             stats["bytes_staged"] = s.bytes_staged;
             stats["bytes_received"] = s.bytes_received;
             stats["writes_posted"] = s.writes_posted;
             stats["writes_sent"] = s.writes_sent;
             stats["writes_received"] = s.writes_received;
             stats["writes_refused"] = s.writes_refused.total;
             stats["handshakes_refused"] = s.handshakes_refused.total;
             stats["peers_refused"] = s.peers_refused.total;
             stats["peers"] = s.peers;
             return stats;
           })
      .def("refusals",
           [](const TransferEngine& engine) {
             EngineStats s;
             {
               py::gil_scoped_release release;
               s = engine.stats();
             }
             py::dict refusals;
             refusals["handshake"] = by_name(s.handshakes_refused);
             refusals["peer"] = by_name(s.peers_refused);
             refusals["write"] = by_name(s.writes_refused);
             return refusals;
           })
      .def(
          "allocate",
          [](TransferEngine& engine, std::size_t nbytes, std::optional<int> gpu,
             bool require_nics) {
            return unwrap(gpu ? engine.allocate_on_gpu(*gpu, nbytes, require_nics)
                              : engine.allocate(nbytes, require_nics));
          },
          py::arg("nbytes"), py::arg("gpu"), py::arg("require_nics") = false, NoGil())
      .def(
          "register_memory",
          [](TransferEngine& engine, std::uintptr_t address, std::size_t nbytes,
             bool require_nics) {
            return unwrap(
                engine.register_memory(reinterpret_cast<void*>(address), nbytes, require_nics));
          },
          py::arg("address"), py::arg("nbytes"), py::arg("require_nics") = false, NoGil())
      .def_end(
          "deregister",
          [](TransferEngine& engine, const RegionPtr& region) {
            unwrap(engine.deregister(region));
          },
          py::arg("region"), NoGil())
      .def(
          "connect",
          [](TransferEngine& engine, const std::string& address, double timeout) {
            return engine.connect(unwrap(EngineAddress::parse(address)),
                                  seconds(timeout, "timeout is"));
          },
          py::arg("address"), py::arg("timeout"), NoGil())
      .def_end("disconnect", &TransferEngine::disconnect, py::arg("peer"), NoGil())
      .def(
          "fence", [](TransferEngine& engine, PeerId peer) { unwrap(engine.fence(peer)); },
          py::arg("peer"), NoGil())
      .def(
          "send",
          [](TransferEngine& engine, PeerId peer, const py::bytes& data) {
            std::string copy = data;
            py::gil_scoped_release release;
            unwrap(engine.send(peer, std::move(copy)));
          },
          py::arg("peer"), py::arg("data"));
  return bound;
}

}  // namespace kvxfer::python
