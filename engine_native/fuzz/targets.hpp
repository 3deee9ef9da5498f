// The functions that a fuzzer calls with bytes such as a peer may send. They abort if a promise is
// broken. verify/fuzz/seeds writes the inputs that each starts from; verify/fuzz/corpus/NAME holds
// the inputs that were found.
#pragma once

#include <array>
#include <string_view>

namespace kvxfer::fuzz {

void handshake(std::string_view input);  // both ends, strangers and members
void bootstrap(std::string_view input);  // sockets until they are authenticated
void control(std::string_view input);    // frames of a control stream, also about NICs
void tcp_lane(std::string_view input);   // frames of the tcp fabric
void tcp_lane_gpu(std::string_view input);
void local_path(std::string_view input);  // descriptor rings and region messages
void local_path_gpu(std::string_view input);
void rendezvous(std::string_view input);   // two engines of one host that come to share memory
void descriptors(std::string_view input);  // data passed on as bytes or text

struct Target {
  std::string_view name;
  void (*run)(std::string_view input);
  bool on_gpu = false;  // needs the double, which has to be loaded
};
inline constexpr std::array<Target, 9> kTargets{{{"handshake", handshake},
                                                 {"bootstrap", bootstrap},
                                                 {"control", control},
                                                 {"tcp_lane", tcp_lane},
                                                 {"tcp_lane_gpu", tcp_lane_gpu, true},
                                                 {"local_path", local_path},
                                                 {"local_path_gpu", local_path_gpu, true},
                                                 {"rendezvous", rendezvous},
                                                 {"descriptors", descriptors}}};

}  // namespace kvxfer::fuzz
