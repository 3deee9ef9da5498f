#include "fabric/ofi/libfabric.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <string_view>
#include <vector>

namespace kvxfer::ofi {

Result<Libfabric> Libfabric::load() {
  // NOLINTBEGIN(concurrency-mt-unsafe): the environment is read and set before any library that
  // looks at it is loaded, and dlerror() is the thread's own in glibc.
  // Debian's library loads one for Omni-Path, which would take over the signals of a crash.
  ::setenv("IPATH_NO_BACKTRACE", "1", 0);
  ::setenv("HFI_NO_BACKTRACE", "1", 0);

  std::vector<std::string> places{"/opt/amazon/efa/lib/libfabric.so.1",
                                  "/opt/amazon/efa/lib64/libfabric.so.1", "libfabric.so.1"};
  const char* const named = std::getenv("KVXFER_LIBFABRIC");
  if (named && *named) places = {named};
  void* library = nullptr;
  std::string why;
  for (const std::string& place : places) {
    // Providers have threads and exit handlers, so it can never be unloaded.
    library = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library) break;
    const char* const error = ::dlerror();
    why += (why.empty() ? "" : "; ") + std::string(error ? error : place);
  }
  // NOLINTEND(concurrency-mt-unsafe)
  if (!library) {
    return Error{Errc::fabric_unavailable,
                 "libfabric cannot be loaded (" + why +
                     "); install AWS's EFA software or libfabric1, or name libfabric.so.1 in "
                     "KVXFER_LIBFABRIC"};
  }

  Libfabric loaded{};
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(library, name));
    if (!function) missing = name;
  };
  find(loaded.getinfo, "fi_getinfo");
  find(loaded.freeinfo, "fi_freeinfo");
  find(loaded.dupinfo, "fi_dupinfo");
  find(loaded.fabric, "fi_fabric");
  find(loaded.version, "fi_version");
  find(loaded.strerror, "fi_strerror");
  if (!missing.empty()) {
    return Error{Errc::fabric_unavailable, "the libfabric.so.1 that was found has no " + missing +
                                               "; name another in "
                                               "KVXFER_LIBFABRIC"};
  }
  return loaded;
}

std::string Libfabric::version_text() const {
  const std::uint32_t both = version();
  return std::to_string(FI_MAJOR(both)) + "." + std::to_string(FI_MINOR(both));
}

Error Libfabric::failed(std::string_view what, ssize_t error) const {
  const auto positive = static_cast<int>(-error);
  const Errc code = positive == FI_ENOMEM || positive == FI_EMFILE || positive == FI_ENOSPC
                        ? Errc::out_of_memory
                        : Errc::fabric_unavailable;
  return {code,
          std::string(what) + ": " + strerror(positive) + " (libfabric " + version_text() + ")"};
}

}  // namespace kvxfer::ofi
