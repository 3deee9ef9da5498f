// Dispatch and combine of MoE token rows.
#include <pybind11/numpy.h>

#include <array>
#include <optional>

#include "bindings.hpp"
#include "moe/exchange.hpp"

namespace py = pybind11;

namespace kvxfer::python {
namespace {

using moe::Exchange;
template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

moe::DType dtype(const std::string& text) {
  for (const auto each :
       {moe::DType::f32, moe::DType::bf16, moe::DType::f16, moe::DType::f8_e4m3}) {
    if (text == moe::name_of(each)) return each;
  }
  throw NativeError(
      {Errc::invalid_argument, "dtype '" + text + "'; there are f32, bf16, f16 and f8_e4m3"});
}

const char* name_of(moe::Waited waited) {
  switch (waited) {
    case moe::Waited::done:
      return "done";
    case moe::Waited::left_out:
      return "left out";
    case moe::Waited::events:
      return "events";
    case moe::Waited::deadline:
      break;
  }
  return "deadline";
}

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <class T>
std::span<const T> of(const Array<T>& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}

Array<std::int64_t> to_array(const std::vector<std::int64_t>& values) {
  return Array<std::int64_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::tuple ranks_in(const std::vector<bool>& flags) {
  std::vector<std::size_t> ranks;
  for (std::size_t rank = 0; rank < flags.size(); ++rank) {
    if (flags[rank]) ranks.push_back(rank);
  }
  py::tuple found(ranks.size());
  for (std::size_t at = 0; at < ranks.size(); ++at) found[at] = ranks[at];
  return found;
}

moe::Order order(bool by_source) {
  return by_source ? moe::Order::by_source : moe::Order::by_expert;
}

UniqueFd duplicate(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (copy) return copy;
  throw NativeError(
      {Errc::invalid_argument, "cannot duplicate the file descriptor " + std::to_string(fd)});
}

std::uint64_t dispatch_send(Exchange& exchange, std::uint32_t slot, std::uintptr_t x,
                            std::uintptr_t scales, const Array<std::int64_t>& ids,
                            const Array<float>& weights) {
  const py::ssize_t top_k = exchange.shape().top_k;
  if (ids.ndim() != 2 || ids.shape(1) != top_k || weights.ndim() != 2 ||
      weights.shape(0) != ids.shape(0) || weights.shape(1) != top_k) {
    throw NativeError({Errc::invalid_argument,
                       "ids and weights must both be [tokens, " + std::to_string(top_k) + "]"});
  }
  const moe::Tokens tokens{.x = at<const void>(x),
                           .x_scales = at<const float>(scales),
                           .count = static_cast<std::size_t>(ids.shape(0)),
                           .ids = ids.data(),
                           .weights = weights.data()};
  const py::gil_scoped_release unlocked;
  return unwrap(exchange.dispatch_send(slot, tokens));
}

}  // namespace

void bind_moe(py::module_& module) {
  Owned<Exchange> bound(module, "MoeExchange");
  static_cast<Owned<Exchange>::Base&>(bound).def(
      py::init([](TransferEngine& engine, std::uint32_t ranks, std::uint32_t rank,
                  std::uint32_t experts, std::vector<std::uint32_t> local_experts,
                  std::uint32_t top_k, std::uint32_t hidden, std::uint32_t max_tokens,
                  std::uint32_t slots, const std::string& input, const std::string& wire,
                  const std::string& combine, const std::string& output, std::uint32_t scale_block,
                  double spin, double timeout) {
        moe::Shape shape{.ranks = ranks,
                         .rank = rank,
                         .experts = experts,
                         .local_experts = std::move(local_experts),
                         .top_k = top_k,
                         .hidden = hidden,
                         .max_tokens = max_tokens,
                         .slots = slots,
                         .input = dtype(input),
                         .wire = dtype(wire),
                         .combine = dtype(combine),
                         .output = dtype(output),
                         .scale_block = scale_block};
        const moe::Options options{.spin = seconds(spin, "spin"),
                                   .timeout = seconds(timeout, "timeout")};
        const py::gil_scoped_release unlocked;
        return unwrap(Exchange::create(engine, std::move(shape), options));
      }),
      py::keep_alive<1, 2>(), py::arg("engine"), py::kw_only(), py::arg("ranks"), py::arg("rank"),
      py::arg("experts"), py::arg("local_experts"), py::arg("top_k"), py::arg("hidden"),
      py::arg("max_tokens"), py::arg("slots") = 2, py::arg("input_dtype") = "bf16",
      py::arg("wire_dtype") = "bf16", py::arg("combine_dtype") = "bf16",
      py::arg("output_dtype") = "bf16", py::arg("scale_block") = 0, py::arg("spin") = 0.0,
      py::arg("timeout") = 30.0);
  bound.def_property_readonly("memory_fd", &Exchange::memory_fd)
      .def_property_readonly("memory_bytes", &Exchange::memory_bytes)
      .def_property_readonly("doorbell_fd", &Exchange::doorbell_fd)
      .def(
          "add_local",
          [](Exchange& exchange, std::uint32_t rank, PeerId peer, int memory, std::size_t nbytes,
             int doorbell) {
            unwrap(exchange.add_local(rank, peer, duplicate(memory), nbytes, duplicate(doorbell)));
          },
          py::arg("rank"), py::arg("peer"), py::arg("memory"), py::arg("nbytes"),
          py::arg("doorbell"), NoGil())
      .def(
          "open_remote",
          [](Exchange& exchange, std::uint32_t rank, PeerId peer) {
            std::string terms;
            {
              const py::gil_scoped_release unlocked;
              terms = unwrap(exchange.open_remote(rank, peer));
            }
            return py::bytes(terms);
          },
          py::arg("rank"), py::arg("peer"))
      .def(
          "add_remote",
          [](Exchange& exchange, std::uint32_t rank, PeerId peer, const std::string& terms) {
            unwrap(exchange.add_remote(rank, peer, terms));
          },
          py::arg("rank"), py::arg("peer"), py::arg("terms"), NoGil())
      .def("remove", &Exchange::remove, py::arg("rank"), NoGil())
      .def("memory_parts", &Exchange::memory_parts)
      .def(
          "set_view",
          [](Exchange& exchange, std::uint64_t number, std::vector<bool> alive,
             const Array<std::int64_t>& table, std::uint64_t first_step) {
            const auto experts = of(table);
            const moe::View view{.number = number,
                                 .alive = std::move(alive),
                                 .table = {experts.begin(), experts.end()}};
            const py::gil_scoped_release unlocked;
            unwrap(exchange.set_view(view, first_step));
          },
          py::arg("number"), py::arg("alive"), py::arg("table"), py::arg("first_step"))
      .def(
          "set_hosts",
          [](Exchange& exchange, std::vector<std::uint32_t> hosts) {
            unwrap(exchange.set_hosts(std::move(hosts)));
          },
          py::arg("hosts"))
      .def_property_readonly("next_step", &Exchange::next_step)
      .def("lost", &Exchange::lost)
      .def(
          "why_lost",
          [](const Exchange& exchange, std::uint32_t rank) {
            const Error why = exchange.why_lost(rank);
            return py::make_tuple(std::string(kvxfer::name(why.code)), to_text(why.text));
          },
          py::arg("rank"))
      .def(
          "input",
          [](Exchange& exchange, std::uint32_t slot) {
            return reinterpret_cast<std::uintptr_t>(unwrap(exchange.input(slot)));
          },
          py::arg("slot"))
      .def(
          "answers",
          [](Exchange& exchange, std::uint32_t slot) {
            return reinterpret_cast<std::uintptr_t>(unwrap(exchange.answers(slot)));
          },
          py::arg("slot"))
      .def(
          "leave_out",
          [](Exchange& exchange, std::uint64_t step) { unwrap(exchange.leave_out(step)); },
          py::arg("step"))
      .def("skip_step", &Exchange::skip_step)
      .def(
          "check_free",
          [](const Exchange& exchange, std::uint32_t slot) { unwrap(exchange.check_free(slot)); },
          py::arg("slot"))
      .def(
          "check_placed",
          [](const Exchange& exchange, std::uint32_t slot) { unwrap(exchange.check_placed(slot)); },
          py::arg("slot"))
      .def("dispatch_send", &dispatch_send, py::arg("slot"), py::arg("x"), py::arg("scales"),
           py::arg("ids"), py::arg("weights"))
      .def(
          "dispatch_wait",
          [](Exchange& exchange, std::uint32_t slot, double timeout) {
            return name_of(unwrap(exchange.dispatch_wait(slot, seconds(timeout))));
          },
          py::arg("slot"), py::arg("timeout"), NoGil())
      .def(
          "arrival",
          [](const Exchange& exchange, std::uint32_t slot, bool by_source, std::int64_t align,
             std::optional<std::int64_t> capacity) {
            const moe::Arrival& arrival = *unwrap(exchange.arrival(slot));
            const moe::Places places = unwrap(moe::places_of(
                arrival, {.order = order(by_source), .align = align, .capacity = capacity}));
            return py::make_tuple(to_array(arrival.expert_rows), to_array(arrival.source_rows),
                                  to_array(places.begins), places.rows);
          },
          py::arg("slot"), py::arg("by_source"), py::arg("align"), py::arg("capacity"))
      .def(
          "place",
          [](Exchange& exchange, std::uint32_t slot, bool by_source,
             const Array<std::int64_t>& begins, std::uintptr_t x, std::uintptr_t scales,
             std::uintptr_t ids, std::uintptr_t weights) {
            const auto starts = of(begins);
            {
              const py::gil_scoped_release unlocked;
              unwrap(exchange.place(slot, order(by_source), starts, at<void>(x), at<float>(scales),
                                    at<std::int32_t>(ids), at<float>(weights)));
            }
            return ranks_in(unwrap(exchange.arrival(slot))->missing);
          },
          py::arg("slot"), py::arg("by_source"), py::arg("begins"), py::arg("x"), py::arg("scales"),
          py::arg("ids"), py::arg("weights"))
      .def(
          "combine_send",
          [](Exchange& exchange, std::uint32_t slot, std::uintptr_t y) {
            unwrap(exchange.combine_send(slot, at<const void>(y)));
          },
          py::arg("slot"), py::arg("y"), NoGil())
      .def(
          "combine_wait",
          [](Exchange& exchange, std::uint32_t slot, double timeout) {
            return name_of(unwrap(exchange.combine_wait(slot, seconds(timeout))));
          },
          py::arg("slot"), py::arg("timeout"), NoGil())
      .def(
          "combine",
          [](Exchange& exchange, std::uint32_t slot, std::uintptr_t out) {
            std::vector<bool> missing;
            {
              const py::gil_scoped_release unlocked;
              missing = unwrap(exchange.combine(slot, at<void>(out)));
            }
            return ranks_in(missing);
          },
          py::arg("slot"), py::arg("out"))
      .def("awaited", &Exchange::awaited, py::arg("slot"))
      .def("events", [](Exchange& exchange) { return to_list(exchange.events()); })
      .def("quiet", &Exchange::quiet);
}

}  // namespace kvxfer::python
