// Completions and counters. Nothing calls back into Python: completions are fetched with drain()
// when event_fd is readable.
#include "bindings.hpp"
#include "memory_region.hpp"

namespace py = pybind11;

namespace kvxfer::python {
namespace {

// Polls between two reads of the clock.
constexpr int kPollsPerLook = 64;

const char* kind_name(Completion::Kind kind) {
  switch (kind) {
    case Completion::Kind::connect:
      return "connect";
    case Completion::Kind::write:
      return "write";
    case Completion::Kind::counter:
      return "counter";
    case Completion::Kind::arrival:
      return "arrival";
    case Completion::Kind::released:
      return "released";
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

}  // namespace

// A peer chooses its name: invalid UTF-8 in it must not cost a completion.
py::object to_text(const std::string& text) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
}

py::list to_list(const std::vector<Completion>& completions) {
  py::list list;
  for (const Completion& c : completions) {
    py::list failed;
    for (const PartFailure& each : c.failed) {
      failed.append(py::make_tuple(each.part, std::string(name(each.code)), to_text(each.text)));
    }
    list.append(py::make_tuple(kind_name(c.kind), c.id, c.peer, std::string(name(c.code)),
                               to_text(c.text), py::bytes(c.data), c.fabric, c.timestamp_ns,
                               failed));
  }
  return list;
}

void bind_completions(EngineClass& bound) {
  bound.def_property_readonly("event_fd", &TransferEngine::event_fd)
      .def("drain", [](TransferEngine& engine) { return to_list(engine.drain()); })
      .def(
          "allocate_counter",
          [](TransferEngine& engine, std::optional<PeerId> writer) {
            return unwrap(engine.allocate_counter(writer));
          },
          py::arg("writer"))
      .def(
          "grant",
          [](TransferEngine& engine, Imm imm,
             const std::vector<std::tuple<RegionPtr, std::uint64_t, std::uint64_t>>& ranges) {
            std::vector<RegionRange> asked;
            asked.reserve(ranges.size());
            for (const auto& [region, offset, length] : ranges) {
              asked.push_back({region, offset, length});
            }
            py::list descriptors;
            for (const MrDescriptor& each : unwrap(engine.grant(imm, asked))) {
              descriptors.append(py::bytes(each.encode()));
            }
            return descriptors;
          },
          py::arg("imm"), py::arg("ranges"))
      .def("counter_value", &TransferEngine::counter_value, py::arg("imm"))
      .def(
          "poll_counter",
          [](TransferEngine& engine, Imm imm, std::uint64_t total, double for_seconds) {
            const auto end = std::chrono::steady_clock::now() + seconds(for_seconds);
            while (true) {
              for (int i = 0; i < kPollsPerLook; ++i) {
                const std::uint64_t value = engine.counter_value(imm);
                if (value >= total) return value;
                engine.poll();
              }
              if (std::chrono::steady_clock::now() >= end) return engine.counter_value(imm);
            }
          },
          py::arg("imm"), py::arg("total"), py::arg("for_seconds"), NoGil())
      .def(
          "expect",
          [](TransferEngine& engine, Imm imm, std::uint64_t total, bool at_least) {
            unwrap(engine.expect(imm, total, at_least ? Expect::at_least : Expect::exactly));
          },
          py::arg("imm"), py::arg("total"), py::kw_only(), py::arg("at_least"))
      .def(
          "subscribe", [](TransferEngine& engine, Imm imm) { unwrap(engine.subscribe(imm)); },
          py::arg("imm"))
      .def("take_arrivals", &TransferEngine::take_arrivals, py::arg("imm"))
      .def_end("release_counter", &TransferEngine::release_counter, py::arg("imm"), NoGil())
      .def_end("begin_release_counter", &TransferEngine::begin_release_counter, py::arg("imm"),
               NoGil());
}

}  // namespace kvxfer::python
