// The socket on which libfabric's tcp listens for an endpoint, and the sockets that it accepted
// there. Up to 2.6 libfabric frees the listener when the endpoint is closed, and reads it again
// when a connection that it had accepted sends its first message (the TODO of xnet_pep_close() in
// prov/tcp/src/xnet_pep.c). A peer connects whenever it writes, also after a connection broke, so
// these connections are ended first. libfabric exposes none of its sockets: they are found by their
// address.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <utility>

namespace kvxfer::ofi {

class TcpListener {
 public:
  // `address` is a sockaddr, as fi_getname returns it.
  explicit TcpListener(std::string address) : address_(std::move(address)) {}

  // Shuts the listener; no peer can connect after this.
  void shut();
  // Shuts accepted sockets that libfabric has not closed yet. Returns their number.
  std::size_t shut_accepted();

 private:
  std::string address_;
  ino_t inode_ = 0;  // set once shut
};

}  // namespace kvxfer::ofi
