// What a fuzzer calls, each with bytes such as a peer may send. They abort where a promise is
// broken. verify/fuzz/seeds writes what each starts from; verify/fuzz/corpus/NAME is what was
// found.
#pragma once

#include <array>
#include <string_view>

namespace kvxfer::fuzz {

void handshake(std::string_view input);    // both ends, strangers and members
void bootstrap(std::string_view input);    // sockets until they are authenticated
void control(std::string_view input);      // frames of a control stream, NICs' among them
void tcp_lane(std::string_view input);     // frames of the tcp fabric
void local_path(std::string_view input);   // descriptor rings and region messages
void rendezvous(std::string_view input);   // how two engines of one host come to share memory
void descriptors(std::string_view input);  // what is passed on as bytes or text

struct Target {
  std::string_view name;
  void (*run)(std::string_view input);
};
inline constexpr std::array<Target, 7> kTargets{{{"handshake", handshake},
                                                 {"bootstrap", bootstrap},
                                                 {"control", control},
                                                 {"tcp_lane", tcp_lane},
                                                 {"local_path", local_path},
                                                 {"rendezvous", rendezvous},
                                                 {"descriptors", descriptors}}};

}  // namespace kvxfer::fuzz
