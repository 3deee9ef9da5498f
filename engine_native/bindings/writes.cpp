// Writes: single, paged, scattered, and what they may wait for.
#include <chrono>

#include "bindings.hpp"
#include "memory_region.hpp"
#include "page_list.hpp"

namespace py = pybind11;

namespace kvxfer::python {
namespace {

// No timeout means the engine's operation_timeout.
Duration deadline(std::optional<double> timeout) {
  if (!timeout) return Duration::zero();
  if (*timeout == 0) {
    throw NativeError({Errc::invalid_argument,
                       "timeout is 0 s; pass more, or None for the engine's operation_timeout"});
  }
  return seconds(*timeout, "timeout is");
}

// `after`: a word and the value to wait for, or None.
using After = std::optional<std::pair<std::shared_ptr<WatchWord>, std::uint64_t>>;

WriteOptions write_options(std::optional<Imm> imm, std::optional<double> timeout,
                           std::optional<std::uint32_t> nic, const After& after) {
  WriteOptions options{.imm = imm, .timeout = deadline(timeout), .nic = nic};
  if (after) options.after = {.word = after->first, .value = after->second};
  return options;
}

py::tuple to_tuple(const Submitted& submitted) {
  return py::make_tuple(submitted.id, submitted.writes, submitted.immediates, submitted.bytes);
}

py::tuple to_tuple(const Scattered& scattered) {
  return py::make_tuple(scattered.id, scattered.writes, scattered.immediates, scattered.bytes);
}

// Offsets and lengths from Python, in place of SingleWrites.
struct Ranges {
  Ranges(const py::object& source_offsets, const py::object& destination_offsets,
         const py::object& sizes)
      : from(source_offsets, "src_offsets"),
        to(destination_offsets, "dst_offsets"),
        lengths(sizes, "lengths") {}

  bool have(std::size_t count) const {
    return from.pages().size() == count && to.pages().size() == count &&
           lengths.pages().size() == count;
  }
  SingleWrite at(std::size_t i, const char* of) const {
    if (from.pages()[i] < 0 || to.pages()[i] < 0 || lengths.pages()[i] < 0) {
      throw NativeError({Errc::out_of_bounds, std::string(of) +
                                                  " has a negative offset or length "
                                                  "at position " +
                                                  std::to_string(i)});
    }
    return {.source_offset = static_cast<std::uint64_t>(from.pages()[i]),
            .destination_offset = static_cast<std::uint64_t>(to.pages()[i]),
            .length = static_cast<std::uint64_t>(lengths.pages()[i])};
  }

  PageList from;
  PageList to;
  PageList lengths;
};

std::vector<ScatterPart> scatter_parts(std::size_t count,
                                       const std::vector<std::string>& destinations,
                                       const Ranges& ranges) {
  if (destinations.size() != count || !ranges.have(count)) {
    throw NativeError(
        {Errc::invalid_argument, "a scatter to " + std::to_string(count) +
                                     " peers needs as many destinations, offsets and lengths"});
  }
  std::vector<ScatterPart> parts;
  for (std::size_t i = 0; i < count; ++i) {
    parts.push_back({.member = i,
                     .destination = unwrap(MrDescriptor::decode(destinations[i])),
                     .write = ranges.at(i, "the scatter")});
  }
  return parts;
}

std::vector<ListedWrite> listed_writes(const std::vector<RegionPtr>& sources,
                                       const std::vector<std::string>& destinations,
                                       const Ranges& ranges) {
  const std::size_t count = sources.size();
  if (destinations.size() != count || !ranges.have(count)) {
    throw NativeError(
        {Errc::invalid_argument, "a list of " + std::to_string(count) +
                                     " sources needs as many destinations, offsets and lengths"});
  }
  std::vector<ListedWrite> writes;
  writes.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    // Lists name the same few regions again and again.
    const bool same = i > 0 && destinations[i] == destinations[i - 1];
    writes.push_back({.source = sources[i],
                      .destination = same ? writes.back().destination
                                          : unwrap(MrDescriptor::decode(destinations[i])),
                      .write = ranges.at(i, "the list")});
  }
  return writes;
}

void bind_watch_word(py::module_& module) {
  py::class_<WatchWord, std::shared_ptr<WatchWord>>(module, "WatchWord")
      .def(py::init(&TransferEngine::watch_word))
      .def_property_readonly(
          "address",
          [](const WatchWord& word) { return reinterpret_cast<std::uintptr_t>(&word.value); })
      .def_property_readonly(
          "value", [](const WatchWord& word) { return word.value.load(std::memory_order_acquire); })
      .def(
          "add",
          [](WatchWord& word, std::uint64_t by) {
            return word.value.fetch_add(by, std::memory_order_release) + by;
          },
          py::arg("by") = 1);
}

void bind_streams(py::module_& module, EngineClass& bound) {
  const auto stream_of = [](std::uintptr_t handle) { return reinterpret_cast<void*>(handle); };
  py::class_<StreamWord, std::shared_ptr<StreamWord>>(module, "StreamWord")
      .def_property_readonly(
          "word",
          [](const StreamWord& word) { return std::const_pointer_cast<WatchWord>(word.word()); })
      .def(
          "add_on",
          [=](StreamWord& word, std::uintptr_t stream, std::uint64_t by) {
            unwrap(word.add_on(stream_of(stream), by));
          },
          py::arg("stream"), py::arg("by"), py::call_guard<py::gil_scoped_release>());
  py::class_<StreamWait, std::shared_ptr<StreamWait>>(module, "StreamWait")
      .def("reached", [](const StreamWait& wait) { return unwrap(wait.reached()); })
      .def_property_readonly("address", [](const StreamWait& wait) {
        return reinterpret_cast<std::uintptr_t>(&wait.word());
      });
  py::class_<CounterMirror, std::shared_ptr<CounterMirror>>(module, "CounterMirror")
      .def_property_readonly(
          "value",
          [](const CounterMirror& mirror) { return mirror.word().load(std::memory_order_acquire); })
      .def_property_readonly("address", [](const CounterMirror& mirror) {
        return reinterpret_cast<std::uintptr_t>(&mirror.word());
      });
  bound
      .def(
          "mirror_counter",
          [](TransferEngine& engine, int gpu, Imm imm) {
            return unwrap(engine.mirror_counter(gpu, imm));
          },
          py::arg("gpu"), py::arg("imm"), py::call_guard<py::gil_scoped_release>())
      .def(
          "stream_word",
          [](TransferEngine& engine, int gpu) { return unwrap(engine.stream_word(gpu)); },
          py::arg("gpu"), py::call_guard<py::gil_scoped_release>())
      .def(
          "wait_on_stream",
          [=](TransferEngine& engine, int gpu, std::uintptr_t stream, Imm imm, std::uint64_t total,
              std::optional<double> timeout, bool at_least) {
            return unwrap(engine.wait_on_stream(gpu, stream_of(stream), imm, total,
                                                deadline(timeout),
                                                at_least ? Expect::at_least : Expect::exactly));
          },
          py::arg("gpu"), py::arg("stream"), py::arg("imm"), py::arg("total"), py::kw_only(),
          py::arg("timeout"), py::arg("at_least"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_writes(py::module_& module, EngineClass& bound) {
  bind_watch_word(module);
  bind_streams(module, bound);
  bound
      .def(
          "write",
          [](TransferEngine& engine, PeerId peer, const RegionPtr& source,
             const std::string& destination, std::uint64_t source_offset,
             std::uint64_t destination_offset, std::uint64_t length, std::optional<Imm> imm,
             std::optional<double> timeout, std::optional<std::uint32_t> nic, const After& after) {
            return to_tuple(
                unwrap(engine.write(peer, source, unwrap(MrDescriptor::decode(destination)),
                                    {.source_offset = source_offset,
                                     .destination_offset = destination_offset,
                                     .length = length},
                                    write_options(imm, timeout, nic, after))));
          },
          py::arg("peer"), py::arg("source"), py::arg("destination"), py::kw_only(),
          py::arg("source_offset"), py::arg("destination_offset"), py::arg("length"),
          py::arg("imm"), py::arg("timeout"), py::arg("nic"), py::arg("after"))
      .def(
          "write_pages",
          [](TransferEngine& engine, PeerId peer, const RegionPtr& source,
             const std::string& destination, std::uint64_t page_length,
             const py::object& source_pages, const py::object& destination_pages,
             std::uint64_t source_stride, std::uint64_t destination_stride,
             std::uint64_t source_offset, std::uint64_t destination_offset, std::optional<Imm> imm,
             std::optional<double> timeout, std::optional<std::uint32_t> nic, const After& after) {
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
                                                    write_options(imm, timeout, nic, after)));
            }
            return to_tuple(submitted);
          },
          py::arg("peer"), py::arg("source"), py::arg("destination"), py::kw_only(),
          py::arg("page_length"), py::arg("source_pages"), py::arg("destination_pages"),
          py::arg("source_stride"), py::arg("destination_stride"), py::arg("source_offset"),
          py::arg("destination_offset"), py::arg("imm"), py::arg("timeout"), py::arg("nic"),
          py::arg("after"))
      .def(
          "write_list",
          [](TransferEngine& engine, PeerId peer, const std::vector<RegionPtr>& sources,
             const std::vector<std::string>& destinations, const py::object& source_offsets,
             const py::object& destination_offsets, const py::object& lengths,
             std::optional<Imm> imm, std::optional<double> timeout,
             std::optional<std::uint32_t> nic, const After& after) {
            const auto writes = listed_writes(sources, destinations,
                                              {source_offsets, destination_offsets, lengths});
            Submitted submitted;
            {
              py::gil_scoped_release release;
              submitted =
                  unwrap(engine.write_list(peer, writes, write_options(imm, timeout, nic, after)));
            }
            return to_tuple(submitted);
          },
          py::arg("peer"), py::arg("sources"), py::arg("destinations"), py::kw_only(),
          py::arg("source_offsets"), py::arg("destination_offsets"), py::arg("lengths"),
          py::arg("imm"), py::arg("timeout"), py::arg("nic"), py::arg("after"))
      .def(
          "write_imm",
          [](TransferEngine& engine, PeerId peer, Imm imm, std::optional<double> timeout,
             std::optional<std::uint32_t> nic, const After& after) {
            return to_tuple(
                unwrap(engine.write_imm(peer, imm, write_options(imm, timeout, nic, after))));
          },
          py::arg("peer"), py::arg("imm"), py::kw_only(), py::arg("timeout"), py::arg("nic"),
          py::arg("after"))
      .def(
          "scatter",
          [](TransferEngine& engine, const RegionPtr& source, const std::vector<PeerId>& peers,
             const std::vector<std::string>& destinations, const py::object& source_offsets,
             const py::object& destination_offsets, const py::object& lengths,
             std::optional<Imm> imm, std::optional<double> timeout, const After& after) {
            const auto parts = scatter_parts(peers.size(), destinations,
                                             {source_offsets, destination_offsets, lengths});
            Scattered submitted;
            {
              py::gil_scoped_release release;
              submitted = unwrap(engine.scatter(source, unwrap(engine.peer_group(peers)), parts,
                                                write_options(imm, timeout, std::nullopt, after)));
            }
            return to_tuple(submitted);
          },
          py::arg("source"), py::arg("peers"), py::arg("destinations"), py::kw_only(),
          py::arg("source_offsets"), py::arg("destination_offsets"), py::arg("lengths"),
          py::arg("imm"), py::arg("timeout"), py::arg("after"))
      .def(
          "barrier",
          [](TransferEngine& engine, const std::vector<PeerId>& peers, Imm imm,
             std::optional<double> timeout, const After& after) {
            return to_tuple(
                unwrap(engine.barrier(unwrap(engine.peer_group(peers)), imm,
                                      write_options(imm, timeout, std::nullopt, after))));
          },
          py::arg("peers"), py::arg("imm"), py::kw_only(), py::arg("timeout"), py::arg("after"))
      // For the benchmark: prepares a scatter once, as native code does, then times the call alone.
      .def(
          "time_scatter",
          [](TransferEngine& engine, const RegionPtr& source, const std::vector<PeerId>& peers,
             const std::vector<std::string>& destinations, std::uint64_t length, Imm imm) {
            const PeerGroupPtr group = unwrap(engine.peer_group(peers));
            std::vector<ScatterPart> parts;
            for (std::size_t i = 0; i < peers.size(); ++i) {
              parts.push_back({.member = i,
                               .destination = unwrap(MrDescriptor::decode(destinations.at(i))),
                               .write = {.source_offset = i * length, .length = length}});
            }
            const auto start = std::chrono::steady_clock::now();
            const Scattered submitted = unwrap(engine.scatter(source, group, parts, {.imm = imm}));
            const auto took = std::chrono::steady_clock::now() - start;
            return py::make_tuple(submitted.id, std::chrono::nanoseconds(took).count());
          },
          py::arg("source"), py::arg("peers"), py::arg("destinations"), py::arg("length"),
          py::arg("imm"))
      .def("wake", &TransferEngine::wake)
      .def("cancel", &TransferEngine::cancel, py::arg("operation"), NoGil());
}

}  // namespace kvxfer::python
