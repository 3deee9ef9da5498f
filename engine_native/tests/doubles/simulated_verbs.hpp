// NICs of the mlx5 driver below libibverbs' interface, to try the verbs fabric itself without
// hardware. They hold the engine to the rules of the driver and of the specification:
//
//   a window opens at most 2^31 bytes (EOPNOTSUPP)              mlx5/qp.c, set_bind_wr
//   a region with an open window stays registered (EBUSY)       man ibv_reg_mr
//   a full send queue refuses (ENOMEM); polling one of its      mlx5/qp.c, mlx5_wq_overflow
//     completions makes room
//   a full SRQ refuses (ENOMEM)                                 mlx5/srq.c, mlx5_post_srq_recv
//   inline data beyond the queue pair's limit is refused        mlx5/qp.c, set_data_inl_seg
//   a port that requires a GRH sends no packet without one      man ibv_query_port
//   each state of a queue pair asks for its attributes          man ibv_modify_qp
//   destroying a queue pair removes its completions             mlx5/cq.c, __mlx5_cq_clean
//   two limited members of a partition do not reach each other  IBTA 1.4, 10.9
//   a dmabuf's region takes no windows (EINVAL), has the       man ibv_reg_dmabuf_mr
//     page offset of its iova, and no address
//   a GPU's address is registered with nvidia-peermem only     GPUDirect RDMA, 1.4
//   a RoCE peer's address is resolved before a path joins it,  drivers/infiniband/core/addr.c,
//     which takes as long as nothing answers                     rdma_addr_find_l2_eth_by_grh
//   an immediate without a receive is sent again after the    IBTA 1.4, 9.7.5.2.8, table 45
//     time of the receiver's code, and then fails
//   a speed above NDR is in active_speed_ex alone              rdma-core, struct ibv_port_attr
//   an overrun completion queue is lost                         man ibv_get_async_event
//
// Source paths are those of rdma-core at 691953d. Bytes land late and in any order: at the latest
// when a completion at either end reports them, or when their queue pair has stopped. Bytes for a
// GPU reach its memory when they are flushed, or 50 ms later (cuda_double_on_flush()).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fabric/verbs/verbs_library.hpp"

namespace kvxfer::test {
namespace mlx5 {
struct Network;
}

struct SimulatedDevice {
  std::string name;
  bool infiniband = false;  // otherwise RoCE
  bool grh_required = false;
  std::vector<std::uint16_t> pkeys{0xffff};
  std::uint8_t rail = 0;  // the number of its subnet
  bool windows = true;
  bool dmabuf = true;    // the kernel has peer-to-peer support
  bool peermem = false;  // nvidia-peermem is loaded
  bool loses_writes_to_gpus = false;
  bool fails_writes_to_dmabufs = false;  // such writes end with an error
  int max_srq_wr = 32767;
  std::uint8_t width = 2;     // active_width: four lanes
  std::uint32_t speed = 128;  // NDR
  // The time of a command that goes through the firmware: making or destroying a queue pair or a
  // window, changing a queue pair, registering or deregistering a region.
  std::chrono::microseconds command{200};
};

// The network of all devices of this process. Any thread.
class SimulatedVerbs {
 public:
  SimulatedVerbs();
  ~SimulatedVerbs();
  SimulatedVerbs(const SimulatedVerbs&) = delete;
  SimulatedVerbs& operator=(const SimulatedVerbs&) = delete;

  // The library with all devices that were added; their names are unique.
  std::shared_ptr<const verbs::VerbsLibrary> library() const;
  void add(const SimulatedDevice& device);
  // While down, the port reports it, and no traffic passes.
  void set_link(const std::string& device, bool up);
  // While cut, no traffic passes, and no event reports it.
  void cut(const std::string& device, bool off);
  // While silent, no peer's address is resolved, so joining a path waits.
  void silence(const std::string& device, bool off);
  // From now on each command takes this long (SimulatedDevice::command).
  void delay_commands(const std::string& device, std::chrono::microseconds each);
  // The next `times` deregistrations at the device are refused with EBUSY.
  void refuse_deregistrations(const std::string& device, unsigned times);
  // The number of queue pairs of all devices.
  std::size_t queue_pairs() const;
  // The number of commands so far of threads that poll completions and so answer heartbeats, too.
  std::size_t commands_of_pollers() const;
  // The time that the calling thread has waited for another in here; a real NIC has no such wait.
  static std::uint64_t held_up_ns();

 private:
  std::unique_ptr<mlx5::Network> network_;
};

SimulatedVerbs& simulated_verbs();

}  // namespace kvxfer::test
