// One tcp lane of an engine: a stand-in for one NIC. The poller drives its paths, except for their
// acknowledgements and copies by GPUs, which poll() drives.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "domain.hpp"
#include "fabric/tcp/tcp_path.hpp"
#include "thread_owner.hpp"

namespace kvxfer::tcp {

class TcpDomain final : public Domain {
 public:
  TcpDomain(Poller& poller, ReceiveContext receive_context, PathEvents& events,
            std::size_t window_bytes)
      : poller_(poller),
        receive_context_(receive_context),
        events_(events),
        window_bytes_(window_bytes) {}

  std::string_view fabric() const override { return "tcp"; }
  // Continues with batches that GPUs have copied, then sends the acknowledgements that paths owe.
  void poll() override {
    thread_.check("TcpDomain");
    for (TcpPath* const path : std::exchange(due_.copying, {})) path->step();
    for (TcpPath* const path : std::exchange(due_.owing, {})) path->send_acks();
  }
  bool prepare_sleep() override { return due_.owing.empty(); }
  void finish_sleep() override {}
  void forget_source(const MemoryRegion&) override {}

  // Takes over a connected, authenticated socket.
  Result<std::unique_ptr<Path>> open_path(UniqueFd socket, PathPeer peer) {
    thread_.check("TcpDomain");
    auto path = TcpPath::open(std::move(socket), std::move(peer), window_bytes_, poller_, due_,
                              receive_context_, events_);
    if (!path) return path.error();
    return std::unique_ptr<Path>(std::move(*path));
  }

 private:
  [[no_unique_address]] ThreadOwner thread_;
  Poller& poller_;
  ReceiveContext receive_context_;
  PathEvents& events_;
  std::size_t window_bytes_;
  DuePaths due_;
};

}  // namespace kvxfer::tcp
