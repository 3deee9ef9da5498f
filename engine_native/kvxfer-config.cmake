include(CMakeFindDependencyMacro)
find_dependency(OpenSSL COMPONENTS Crypto)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/kvxfer-targets.cmake)
