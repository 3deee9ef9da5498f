// The Python module kvxfer._native: the engine's interface as it is, typed in _native.pyi.
//
// Every call that can take longer than a lock releases the GIL.
#include "bindings.hpp"

namespace py = pybind11;
using namespace kvxfer;
using namespace kvxfer::python;

PYBIND11_MODULE(_native, module) {
  module.doc() = "kvxfer's native transfer engine";
  module.attr("MAX_MESSAGE_BYTES") = kMaxMessageBytes;
  module.attr("DESCRIPTOR_BYTES") = MrDescriptor::kBytes;
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

  module.attr("BUILT_FABRICS") = py::tuple(py::cast(built_fabrics()));
  bind_options(module);
  bind_memory(module);
  EngineClass bound = bind_engine(module);
  bind_writes(module, bound);
  bind_completions(bound);
  bind_moe(module);
}
