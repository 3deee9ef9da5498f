// The Python module kvxfer._native: the engine's interface as it is, typed in _native.pyi.
//
// Every call that can take longer than a lock releases the GIL. Nothing calls back into Python:
// completions are fetched with drain() when event_fd is readable.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>

#include "dlpack.hpp"
#include "kvxfer/engine.hpp"
#include "memory_region.hpp"
#include "page_list.hpp"

namespace py = pybind11;
using namespace kvxfer;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

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
void unwrap(const Result<void>& result) {
  if (!result) throw NativeError(result.error());
}

Duration seconds(double value) {
  if (!(value >= 0 && value < 1e9)) {
    throw NativeError({Errc::invalid_argument,
                       "a time of " + std::to_string(value) + " s; pass 0 to 1e9 seconds"});
  }
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(value));
}

EngineOptions make_options(const py::bytes& cluster_key, const std::string& name,
                           const std::string& host, const std::string& advertise,
                           std::uint16_t port, bool local, bool tcp, unsigned lanes,
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
  options.lanes = lanes;
  options.window_bytes = window_bytes;
  options.heartbeat_interval = seconds(heartbeat_interval);
  options.peer_timeout = seconds(peer_timeout);
  options.operation_timeout = seconds(operation_timeout);
  options.spin = seconds(spin);
  return options;
}

py::tuple to_tuple(const Submitted& submitted) {
  return py::make_tuple(submitted.id, submitted.writes, submitted.bytes);
}

// A peer chooses its name: whatever it is must not cost anybody a completion.
py::object to_text(const std::string& text) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
}

const char* kind_name(Completion::Kind kind) {
  switch (kind) {
    case Completion::Kind::connect:
      return "connect";
    case Completion::Kind::write:
      return "write";
    case Completion::Kind::counter:
      return "counter";
    case Completion::Kind::peer_up:
      return "peer_up";
    case Completion::Kind::peer_down:
      return "peer_down";
    case Completion::Kind::message:
      return "message";
    case Completion::Kind::notice:
      return "notice";
  }
  return "unknown";
}

void bind_region(py::module_& module) {
  py::class_<MemoryRegion, std::shared_ptr<MemoryRegion>>(module, "MemoryRegion",
                                                          py::buffer_protocol())
      // Another handle of the same region, for the Python class that extends this one.
      .def(py::init([](const std::shared_ptr<MemoryRegion>& region) { return region; }),
           py::arg("region"))
      .def_property_readonly("address",
                             [](const MemoryRegion& region) {
                               return reinterpret_cast<std::uintptr_t>(region.data());
                             })
      .def_property_readonly("nbytes", &MemoryRegion::size)
      .def_property_readonly("shareable", &MemoryRegion::shareable)
      .def_property_readonly(
          "descriptor",
          [](const MemoryRegion& region) { return py::bytes(region.descriptor().encode()); })
      .def("__dlpack__", [](const std::shared_ptr<MemoryRegion>& region,
                            const py::kwargs&) { return to_dlpack(region); })
      .def("__dlpack_device__", [](const MemoryRegion&) { return py::make_tuple(kDlpackCpu, 0); })
      .def_buffer([](MemoryRegion& region) {
        return py::buffer_info(region.data(), 1, py::format_descriptor<std::uint8_t>::format(),
                               static_cast<py::ssize_t>(region.size()));
      });
}

void bind_engine(py::module_& module) {
  py::class_<TransferEngine>(module, "TransferEngine")
      .def(py::init([](const EngineOptions& options) {
             py::gil_scoped_release release;
             return unwrap(TransferEngine::create(options));
           }),
           py::arg("options"))
      .def("close", &TransferEngine::close, NoGil())
      .def_property_readonly("address",
                             [](const TransferEngine& engine) { return engine.address().text(); })
      .def_property_readonly(
          "engine_id", [](const TransferEngine& engine) { return engine.address().engine.hex(); })
      .def_property_readonly("event_fd", &TransferEngine::event_fd)
      .def("drain",
           [](TransferEngine& engine) {
             py::list list;
             for (Completion& c : engine.drain()) {
               list.append(py::make_tuple(kind_name(c.kind), c.id, c.peer,
                                          std::string(name(c.code)), to_text(c.text),
                                          py::bytes(c.data), c.fabric, c.timestamp_ns));
             }
             return list;
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
             stats["bytes_received"] = s.bytes_received;
             stats["writes_sent"] = s.writes_sent;
             stats["writes_received"] = s.writes_received;
             stats["writes_refused"] = s.writes_refused;
             stats["handshakes_refused"] = s.handshakes_refused;
             stats["peers"] = s.peers;
             return stats;
           })
      .def(
          "allocate",
          [](TransferEngine& engine, std::size_t nbytes) {
            return unwrap(engine.allocate(nbytes));
          },
          py::arg("nbytes"), NoGil())
      .def(
          "register_memory",
          [](TransferEngine& engine, std::uintptr_t address, std::size_t nbytes) {
            return unwrap(engine.register_memory(reinterpret_cast<void*>(address), nbytes));
          },
          py::arg("address"), py::arg("nbytes"), NoGil())
      .def("deregister", &TransferEngine::deregister, py::arg("region"), NoGil())
      .def(
          "connect",
          [](TransferEngine& engine, const std::string& address, double timeout) {
            return engine.connect(unwrap(EngineAddress::parse(address)), seconds(timeout));
          },
          py::arg("address"), py::arg("timeout"), NoGil())
      .def("disconnect", &TransferEngine::disconnect, py::arg("peer"), NoGil())
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
          py::arg("peer"), py::arg("data"))
      .def(
          "write",
          [](TransferEngine& engine, PeerId peer, const RegionPtr& source,
             const std::string& destination, std::uint64_t source_offset,
             std::uint64_t destination_offset, std::uint64_t length, std::optional<Imm> imm,
             double timeout) {
            return to_tuple(
                unwrap(engine.write(peer, source, unwrap(MrDescriptor::decode(destination)),
                                    {.source_offset = source_offset,
                                     .destination_offset = destination_offset,
                                     .length = length},
                                    imm, seconds(timeout))));
          },
          py::arg("peer"), py::arg("source"), py::arg("destination"), py::kw_only(),
          py::arg("source_offset"), py::arg("destination_offset"), py::arg("length"),
          py::arg("imm"), py::arg("timeout"))
      .def(
          "write_pages",
          [](TransferEngine& engine, PeerId peer, const RegionPtr& source,
             const std::string& destination, std::uint64_t page_length,
             const py::object& source_pages, const py::object& destination_pages,
             std::uint64_t source_stride, std::uint64_t destination_stride,
             std::uint64_t source_offset, std::uint64_t destination_offset, std::optional<Imm> imm,
             double timeout) {
            const PageList from(source_pages, "src_pages");
            const PageList to(destination_pages, "dst_pages");
            const auto descriptor = unwrap(MrDescriptor::decode(destination));
            Submitted submitted;
            {
              py::gil_scoped_release release;
              submitted = unwrap(engine.write_pages(peer, source, descriptor,
                                                    {.page_length = page_length,
                                                     .source_pages = from.pages(),
                                                     .destination_pages = to.pages(),
                                                     .source_stride = source_stride,
                                                     .destination_stride = destination_stride,
                                                     .source_offset = source_offset,
                                                     .destination_offset = destination_offset},
                                                    imm, seconds(timeout)));
            }
            return to_tuple(submitted);
          },
          py::arg("peer"), py::arg("source"), py::arg("destination"), py::kw_only(),
          py::arg("page_length"), py::arg("source_pages"), py::arg("destination_pages"),
          py::arg("source_stride"), py::arg("destination_stride"), py::arg("source_offset"),
          py::arg("destination_offset"), py::arg("imm"), py::arg("timeout"))
      .def(
          "write_imm",
          [](TransferEngine& engine, PeerId peer, Imm imm, double timeout) {
            return to_tuple(unwrap(engine.write_imm(peer, imm, seconds(timeout))));
          },
          py::arg("peer"), py::arg("imm"), py::arg("timeout"))
      .def("cancel", &TransferEngine::cancel, py::arg("operation"), NoGil())
      .def("allocate_counter",
           [](TransferEngine& engine) { return unwrap(engine.allocate_counter()); })
      .def("counter_value", &TransferEngine::counter_value, py::arg("imm"))
      .def(
          "expect",
          [](TransferEngine& engine, Imm imm, std::uint64_t total) {
            unwrap(engine.expect(imm, total));
          },
          py::arg("imm"), py::arg("total"))
      .def("release_counter", &TransferEngine::release_counter, py::arg("imm"), NoGil());
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "kvxfer's native transfer engine";
  module.attr("MAX_MESSAGE_BYTES") = kMaxMessageBytes;
  module.attr("MIN_CLUSTER_KEY_BYTES") = kMinClusterKeyBytes;

  static PyObject* error_class = PyErr_NewException("kvxfer._native.Error", nullptr, nullptr);
  module.add_object("Error", py::handle(error_class));
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const NativeError& native) {
      const py::tuple arguments =
          py::make_tuple(std::string(name(native.error.code)), native.error.text);
      PyErr_SetObject(error_class, arguments.ptr());
    }
  });

  py::class_<EngineOptions>(module, "EngineOptions")
      .def(py::init(&make_options), py::kw_only(), py::arg("cluster_key"), py::arg("name"),
           py::arg("host"), py::arg("advertise"), py::arg("port"), py::arg("local"), py::arg("tcp"),
           py::arg("lanes"), py::arg("window_bytes"), py::arg("heartbeat_interval"),
           py::arg("peer_timeout"), py::arg("operation_timeout"), py::arg("spin"));
  bind_region(module);
  bind_engine(module);
}
