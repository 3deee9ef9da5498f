// EFA devices below libfabric's interface, so that the ofi fabric can be tried as on AWS without
// one: the fabric "efa-direct" of libfabric 2.5. They hold it to the rules of the provider and of
// the device:
//
//   nothing has an order: the halves of a write, writes of     SRD; fi_efa(7)
//     one endpoint, what either end hears of a write
//   what is on the wire lands also when its sender has gone
//   what a security group does not let through is dropped, and  EC2 user guide, "Elastic Fabric
//     nothing tells of it; an error comes minutes later, here     Adapter": all traffic from and to
//     never                                                       itself; aws-ofi-nccl issue 663
//   memory has to be registered, its key is the provider's,    fi_mr(3); efa_prov_info.c
//     and what is written from it needs its descriptor
//   a closed key stops a write in its middle                   the NIC checks each packet
//   an endpoint that is closed, or whose QKEY another one      efa_io_defs.h, BAD_DEST_QPN and
//     has, takes nothing                                         UNKNOWN_PEER
//   a closed endpoint leaves no completions: those that        fi_endpoint(3), which lets a
//     were not read are gone, and no others follow               provider do so; efa does,
//                                                                libfabric #11405, #11151
//   a full send queue says "later"; here others do, too,       efa_rma.c, ENOMEM
//     now and then, but not behind a write with FI_MORE
//   a write with FI_MORE goes once one without it follows      efa_data_path_direct_entry.h
//   an overrun completion queue is lost                        man ibv_get_async_event
//   an event queue tells of errors, of an endpoint or the      fi_eq(3); none of an endpoint
//     device; efa's name neither                                 that is closed: prov/util
//   GPUs' memory needs FI_HMEM and FI_MR_HMEM, with            efa_user_info.c, efa_mr.c
//     FI_HMEM_CUDA; fi_mr_reg takes memory of the host
//   a dmabuf begins at base_addr + offset, which has its       fi_mr(3), man ibv_reg_dmabuf_mr
//     page offset
//   by a GPU's address the provider takes a dmabuf, too, and   efa_mr.c
//     only where there is none needs nvidia-peermem
//   options of an endpoint are set before it is enabled        efa_ep.c
//   memory of GPUs is left to the NIC by options, else not     stricter: the fabric "efa" copies
//     written from                                               with CUDA where it has to
//   writes without bytes are refused                           stricter: 2.5 takes them
//
// Devices whose immediates consume receives (FI_RX_CQ_DATA) are not among them.
// Bytes for a GPU come to its memory when they are flushed (simulated_gpus.hpp).
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
  bool fails_writes_to_dmabufs = false;  // with an error
};

// The network of all devices of this process. Any thread.
class SimulatedEfa {
 public:
  SimulatedEfa();
  ~SimulatedEfa();
  SimulatedEfa(const SimulatedEfa&) = delete;
  SimulatedEfa& operator=(const SimulatedEfa&) = delete;

  // All devices that were added; names are unique.
  std::shared_ptr<const ofi::Libfabric> library() const;
  void add(const SimulatedEfaDevice& device);
  // Whether libfabric was built with CUDA, and found it; it was until told otherwise.
  void have_cuda(bool has);
  // While held, no write moves; of one that has landed both ends hear.
  void hold(bool held);
  // Meanwhile writes arrive and their senders hear of it, but the receiving hosts do not yet.
  void withhold_arrivals(bool withheld);
  // Reports an error on the event queues of the device: of the endpoint that was opened last, of
  // the device, or of nothing, as efa reports its own.
  enum class ErrorOf : std::uint8_t { endpoint, device, nothing };
  void report_error(const std::string& device, ErrorOf of);
  // How many endpoints were closed.
  std::size_t ends_closed() const;
  // From now on nothing that one device sends comes to the other, acknowledgements neither, and
  // nothing tells of it.
  void swallow(const std::string& from, const std::string& to, bool swallows);
  // Writes and acknowledgements so far.
  std::size_t swallowed() const;

 private:
  std::unique_ptr<efa::Network> network_;
};

SimulatedEfa& simulated_efa();

}  // namespace kvxfer::test
