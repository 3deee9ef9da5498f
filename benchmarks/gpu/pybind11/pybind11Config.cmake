# Stands for pybind11's CMake package where there are headers alone, such as those that torch
# brings: KVXFER_PYBIND11_HEADERS is their folder.
function(pybind11_add_module name)
  set(sources ${ARGN})
  list(REMOVE_ITEM sources NO_EXTRAS)
  Python_add_library(${name} MODULE WITH_SOABI ${sources})
  target_include_directories(${name} SYSTEM PRIVATE ${KVXFER_PYBIND11_HEADERS})
endfunction()
