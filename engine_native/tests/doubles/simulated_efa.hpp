// EFA devices below libfabric's interface, to try the ofi fabric as on AWS without a device: the
// fabric "efa-direct" of libfabric 2.5. They hold the engine to the rules of the provider and of
// the device:
//
//   nothing has an order: the halves of a write, writes of     SRD; fi_efa(7)
//     one endpoint, the completions at the two ends
//   what is on the wire lands even after its sender has closed
//   what a security group does not permit is dropped without   EC2 user guide, "Elastic Fabric
//     a report; an error comes minutes later, here never         Adapter": all traffic from and to
//                                                               itself; aws-ofi-nccl issue 663
//   memory must be registered; its key is the provider's, and  fi_mr(3); efa_prov_info.c
//     a write from it needs its descriptor
//   a closed key stops a write in its middle                   the NIC checks each packet
//   an endpoint that is closed, or whose QKEY another one      efa_io_defs.h, BAD_DEST_QPN and
//     has, takes nothing                                         UNKNOWN_PEER
//   a closed endpoint leaves no completions: unread ones are   fi_endpoint(3), which lets a
//     gone, and no others follow                                 provider do so; efa does,
//                                                                libfabric #11405, #11151
//   a full send queue returns FI_EAGAIN; here other posts do,  efa_rma.c, ENOMEM
//     too, now and then, but not after a write with FI_MORE
//   a write with FI_MORE is sent after one without it follows  efa_data_path_direct_entry.h
//   an overrun completion queue is lost                        man ibv_get_async_event
//   an event queue reports errors of an endpoint or of the     fi_eq(3); none of an endpoint
//     device; efa's events name neither                          that is closed: prov/util
//   GPUs' memory needs FI_HMEM and FI_MR_HMEM, with            efa_user_info.c, efa_mr.c
//     FI_HMEM_CUDA; fi_mr_reg takes memory of the host
//   a dmabuf begins at base_addr + offset, which has its       fi_mr(3), man ibv_reg_dmabuf_mr
//     page offset
//   for a GPU's address the provider opens a dmabuf, and needs efa_mr.c
//     nvidia-peermem only if there is none
//   options of an endpoint are set before it is enabled        efa_ep.c
//   memory of GPUs is left to the NIC by options, and else     stricter: the fabric "efa" copies
//     not written from                                           with CUDA if necessary
//   writes without bytes are refused                           stricter: 2.5 takes them
//
// Devices whose immediates consume receives (FI_RX_CQ_DATA) are not simulated.
// Bytes for a GPU reach its memory when they are flushed (simulated_gpus.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "fabric/ofi/libfabric.hpp"

namespace kvxfer::test {
namespace efa {
struct Network;
}

struct SimulatedEfaDevice {
  std::string name;
  bool dmabuf = true;    // the kernel has peer-to-peer support
  bool peermem = false;  // nvidia-peermem is loaded
  bool loses_writes_to_gpus = false;
  bool fails_writes_to_dmabufs = false;  // such writes end with an error
};

// The network of all devices of this process. Any thread.
class SimulatedEfa {
 public:
  SimulatedEfa();
  ~SimulatedEfa();
  SimulatedEfa(const SimulatedEfa&) = delete;
  SimulatedEfa& operator=(const SimulatedEfa&) = delete;

  // The library with all devices that were added; their names are unique.
  std::shared_ptr<const ofi::Libfabric> library() const;
  void add(const SimulatedEfaDevice& device);
  // Sets whether libfabric was built with CUDA and found it; true until then.
  void have_cuda(bool has);
  // While held, no write moves. Both ends get the completions of writes that have landed.
  void hold(bool held);
  // While withheld, writes arrive and their senders get completions, but receiving hosts do not.
  void withhold_arrivals(bool withheld);
  // Reports an error on the event queues of the device: of the endpoint that was opened last, of
  // the device, or of nothing, as efa reports its errors.
  enum class ErrorOf : std::uint8_t { endpoint, device, nothing };
  void report_error(const std::string& device, ErrorOf of);
  // The number of closed endpoints.
  std::size_t ends_closed() const;
  // From now on everything that one device sends to the other is lost without a report,
  // acknowledgements too.
  void swallow(const std::string& from, const std::string& to, bool swallows);
  // The number of writes and acknowledgements that were swallowed so far.
  std::size_t swallowed() const;

 private:
  std::unique_ptr<efa::Network> network_;
};

SimulatedEfa& simulated_efa();

}  // namespace kvxfer::test
