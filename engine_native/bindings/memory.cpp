// Memory regions.
#include "bindings.hpp"
#include "dlpack.hpp"
#include "memory_region.hpp"
#include "page_checksum.hpp"
#include "page_list.hpp"

namespace py = pybind11;

namespace kvxfer::python {

void bind_memory(py::module_& module) {
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
      .def(
          "checksum",
          [](const MemoryRegion& region, const py::object& offsets, const py::object& numbers,
             std::size_t length) {
            const PageList runs(offsets, "offsets");
            const PageList of(numbers, "numbers");
            const py::gil_scoped_release unlocked;
            return unwrap(
                page_checksum({region.data(), region.size()}, runs.pages(), of.pages(), length));
          },
          py::arg("offsets"), py::arg("numbers"), py::arg("length"))
      .def("__dlpack__", [](const std::shared_ptr<MemoryRegion>& region,
                            const py::kwargs&) { return to_dlpack(region); })
      .def("__dlpack_device__", [](const MemoryRegion&) { return py::make_tuple(kDlpackCpu, 0); })
      .def_buffer([](MemoryRegion& region) {
        return py::buffer_info(region.data(), 1, py::format_descriptor<std::uint8_t>::format(),
                               static_cast<py::ssize_t>(region.size()));
      });
}

}  // namespace kvxfer::python
