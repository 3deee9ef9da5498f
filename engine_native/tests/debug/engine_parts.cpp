#include "debug/engine_parts.hpp"

#include <sys/socket.h>

#include <thread>

#include "fabric/null/null_domain.hpp"
#ifdef KVXFER_HAVE_VERBS
#include "doubles/simulated_verbs.hpp"
#endif

namespace kvxfer::test {

NicDomain& Parts::nic(const std::string& fabric) {
  options = options_for(fabric, "planted");
  if (fabric == "null") options.more_nics = std::make_shared<null::NullFactory>(true);
  nics = good(options.more_nics->open({.options = options,
                                       .poller = poller,
                                       .background = background,
                                       .gpus = gpus,
                                       .receive_context = receive_context(),
                                       .events = neighbours,
                                       .first_number = 0}))
             .nics;
  return *nics.front();
}

BarePath Parts::path(const std::string& fabric) {
  return good(BarePath::open(nic(fabric), {.id = 1, .peer = 1, .label = "'planted'"},
                             [this](const std::function<bool()>& so) {
                               while (!so()) {
                                 if (background.finish() == 0) std::this_thread::yield();
                               }
                             }));
}

ExposedMemory Parts::exposed() {
  return ExposedMemory({.engine = address.engine,
                        .fabrics = fabrics,
                        .peers = peers,
                        .background = background,
                        .gpus = gpus,
                        .counters = counters,
                        .regions = regions,
                        .completions = *completions,
                        .stats = stats});
}

std::array<UniqueFd, 2> sockets(int type) {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

#ifdef KVXFER_HAVE_VERBS
std::shared_ptr<const verbs::VerbsDevice> rdma_device() {
  simulated_verbs().add({.name = "planted"});
  const auto library = simulated_verbs().library();
  ibv_device** const list = library->get_device_list(nullptr);
  ibv_device** found = list;
  while (std::string("planted") != (*found)->name) ++found;
  auto opened = good(verbs::VerbsDevice::open(library, *found, {.name = "planted"}));
  library->free_device_list(list);
  return opened;
}
#endif

}  // namespace kvxfer::test
