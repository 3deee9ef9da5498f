// Memory regions.
#include <cstring>
#include <span>

#include "bindings.hpp"
#include "cuda/gpu.hpp"
#include "dlpack.hpp"
#include "memory_region.hpp"
#include "page_checksum.hpp"
#include "page_list.hpp"

namespace py = pybind11;

namespace kvxfer::python {
namespace {

// Returns the bytes for the processor; raises if it cannot access them.
std::byte* on_host(const MemoryRegion& region) {
  if (region.host()) return region.host();
  throw NativeError({Errc::invalid_argument, "the region is memory of " + region.gpu()->label() +
                                                 ", which the processor cannot read"});
}

// Returns the address of `bytes` bytes from `offset` on; raises if they leave the region.
std::uint64_t place_of(const MemoryRegion& region, std::size_t offset, std::size_t bytes) {
  if (offset <= region.size() && bytes <= region.size() - offset) return region.address() + offset;
  throw NativeError({Errc::out_of_bounds, std::to_string(bytes) + " bytes from " +
                                              std::to_string(offset) + " leave the region of " +
                                              std::to_string(region.size()) + " bytes"});
}

// The bytes of a contiguous buffer.
class Contiguous {
 public:
  Contiguous(const py::buffer& of, bool writable) {
    if (PyObject_GetBuffer(of.ptr(), &view_, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0) {
      throw py::error_already_set();
    }
  }
  ~Contiguous() { PyBuffer_Release(&view_); }
  Contiguous(const Contiguous&) = delete;
  Contiguous& operator=(const Contiguous&) = delete;

  std::span<std::byte> bytes() const {
    return {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

void read(const MemoryRegion& region, const py::buffer& into, std::size_t offset) {
  const Contiguous buffer(into, true);
  const auto bytes = buffer.bytes();
  const std::uint64_t from = place_of(region, offset, bytes.size());
  const py::gil_scoped_release unlocked;
  if (region.gpu()) return unwrap(region.gpu()->read(from, bytes));
  std::memcpy(bytes.data(), region.host() + offset, bytes.size());
}

void write(const MemoryRegion& region, const py::buffer& data, std::size_t offset) {
  const Contiguous buffer(data, false);
  const auto bytes = buffer.bytes();
  const std::uint64_t to = place_of(region, offset, bytes.size());
  const py::gil_scoped_release unlocked;
  if (region.gpu()) return unwrap(region.gpu()->write(to, bytes));
  std::memcpy(region.host() + offset, bytes.data(), bytes.size());
}

py::tuple dlpack_device(const MemoryRegion& region) {
  return region.gpu() ? py::make_tuple(kDlpackCuda, region.gpu()->device())
                      : py::make_tuple(kDlpackCpu, 0);
}

}  // namespace

void bind_memory(py::module_& module) {
  module.def("end_unused_gpus", &cuda::Gpu::end_unused, NoGil());
  py::class_<SharedMemory, SharedMemoryPtr>(module, "SharedMemory", py::buffer_protocol())
      .def(py::init([](std::size_t nbytes) { return unwrap(allocate_shared(nbytes)); }),
           py::arg("nbytes"), NoGil())
      .def_buffer([](SharedMemory& memory) {
        return py::buffer_info(memory.bytes().data(), 1,
                               py::format_descriptor<std::uint8_t>::format(),
                               static_cast<py::ssize_t>(memory.bytes().size()));
      });
  py::class_<MemoryRegion, std::shared_ptr<MemoryRegion>>(module, "MemoryRegion",
                                                          py::buffer_protocol())
      // Another handle of the same region, for the Python class that extends this one.
      .def(py::init([](const std::shared_ptr<MemoryRegion>& region) { return region; }),
           py::arg("region"))
      .def_property_readonly("address", &MemoryRegion::address)
      .def_property_readonly("nbytes", &MemoryRegion::size)
      .def_property_readonly("gpu",
                             [](const MemoryRegion& region) {
                               return region.gpu() ? std::optional(region.gpu()->device())
                                                   : std::nullopt;
                             })
      .def_property_readonly("nics",
                             [](const MemoryRegion& region) {
                               py::list ways;
                               for (const auto& each : region.registrations()) {
                                 each ? ways.append(std::string(name_of(each->way())))
                                      : ways.append(py::none());
                               }
                               return py::tuple(ways);
                             })
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
                page_checksum({on_host(region), region.size()}, runs.pages(), of.pages(), length));
          },
          py::arg("offsets"), py::arg("numbers"), py::arg("length"))
      .def("read", &read, py::arg("into"), py::arg("offset") = 0)
      .def("write", &write, py::arg("data"), py::arg("offset") = 0)
      .def("__dlpack__", [](const std::shared_ptr<MemoryRegion>& region,
                            const py::kwargs&) { return to_dlpack(region); })
      .def("__dlpack_device__", [](const MemoryRegion& region) { return dlpack_device(region); })
      .def_buffer([](MemoryRegion& region) {
        return py::buffer_info(on_host(region), 1, py::format_descriptor<std::uint8_t>::format(),
                               static_cast<py::ssize_t>(region.size()));
      });
}

}  // namespace kvxfer::python
