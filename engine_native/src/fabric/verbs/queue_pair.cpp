#include "fabric/verbs/queue_pair.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "error_text.hpp"
#include "fabric/verbs/path_windows.hpp"

namespace kvxfer::verbs {
namespace {

// Bytes that a request may carry inline; if a device refuses a number, the next is tried.
constexpr std::array<std::uint32_t, 3> kInlineBytes{256, 64, 0};
// An unanswered write fails after (7 + 1) x 4.096 us x 2^17, at least 4.3 s, so that an incast or a
// link that moves to another switch loses no queue pair. rxe retries for ever. A path without
// progress is removed earlier, after EngineTuning::path_timeout.
constexpr std::uint8_t kTimeout = 17;
constexpr std::uint8_t kRetries = 7;
// Credits keep a receive ready for every immediate; if one is missing, the NIC tries 7 times, 5.12
// ms apart.
constexpr std::uint8_t kReceiverWaits = 18;  // IBTA 1.4, table 45
constexpr std::uint8_t kReceiverRetries = 6;
constexpr std::uint8_t kHopLimit = 64;
// Passed where the path MTU is not set; the enumeration has no zero.
constexpr ibv_mtu kNoMtu = IBV_MTU_256;

}  // namespace

ibv_ah_attr address_vector(const Port& port, const PathEndpoint& theirs,
                           const TrafficMarks& marks) {
  ibv_ah_attr way{.dlid = theirs.lid, .sl = marks.service_level, .port_num = port.number};
  // Within an InfiniBand subnet the LID is enough, unless the port requires a global route.
  way.is_global = port.needs_grh || port.link_layer == IBV_LINK_LAYER_ETHERNET ||
                  port.gid.global.subnet_prefix != theirs.gid.global.subnet_prefix;
  way.grh = {.dgid = theirs.gid,
             .sgid_index = static_cast<std::uint8_t>(port.gid_index),
             .hop_limit = kHopLimit,
             .traffic_class = marks.traffic_class};
  return way;
}

Result<std::shared_ptr<QueuePair>> QueuePair::create(std::shared_ptr<const VerbsDevice> device,
                                                     const Port& port, ibv_cq* completions,
                                                     ibv_srq* receives, std::uint32_t sends) {
  for (const std::uint32_t inline_bytes : kInlineBytes) {
    ibv_qp_init_attr wanted{.send_cq = completions,
                            .recv_cq = completions,
                            .srq = receives,
                            .cap = {.max_send_wr = sends + PathWindows::kMaxRequests + 1,
                                    .max_send_sge = 1,
                                    .max_inline_data = inline_bytes},
                            .qp_type = IBV_QPT_RC};
    ibv_qp* const created = device->library().create_qp(device->pd(), &wanted);
    if (!created && errno == EINVAL && inline_bytes > 0) continue;
    if (!created) break;
    std::shared_ptr<QueuePair> pair(
        new QueuePair(std::move(device), created, wanted.cap.max_inline_data));
    const int error =
        pair->modify({.qp_state = IBV_QPS_INIT,
                      .path_mtu = kNoMtu,
                      .qp_access_flags = 0,
                      .pkey_index = port.pkey_index,
                      .port_num = port.number},
                     IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (error == 0) return pair;
    return Error{Errc::nic_lost, "NIC " + pair->device_->name() +
                                     ": a queue pair cannot be set up: " + errno_text(error)};
  }
  return Error{Errc::out_of_memory,
               "NIC " + device->name() + ": a queue pair cannot be created: " + errno_text() +
                   "; raise the locked memory limit (ulimit -l), or use fewer peers"};
}

int QueuePair::modify(ibv_qp_attr attributes, int mask) {
  return device_->library().modify_qp(pair_, &attributes, mask);
}

int QueuePair::join(const ibv_ah_attr& way, const PathEndpoint& ours, const PathEndpoint& theirs) {
  return modify({.qp_state = IBV_QPS_RTR,
                 .path_mtu = static_cast<ibv_mtu>(std::min(ours.mtu, theirs.mtu)),
                 .rq_psn = theirs.packet_sequence,
                 .dest_qp_num = theirs.queue_pair,
                 .ah_attr = way,
                 .max_dest_rd_atomic = 1,
                 .min_rnr_timer = kReceiverWaits},
                IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

int QueuePair::start(const PathEndpoint& ours) {
  const int error = modify({.qp_state = IBV_QPS_RTS,
                            .path_mtu = kNoMtu,
                            .sq_psn = ours.packet_sequence,
                            .qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
                            .max_rd_atomic = 1,
                            .timeout = kTimeout,
                            .retry_cnt = kRetries,
                            .rnr_retry = kReceiverRetries},
                           IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                               IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  started_ = error == 0;
  return error;
}

void QueuePair::stop() { modify({.qp_state = IBV_QPS_ERR, .path_mtu = kNoMtu}, IBV_QP_STATE); }

void QueuePair::destroy() {
  if (pair_) device_->library().destroy_qp(std::exchange(pair_, nullptr));
}

}  // namespace kvxfer::verbs
