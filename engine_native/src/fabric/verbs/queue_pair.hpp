// One reliable-connected queue pair.
#pragma once

#include <memory>
#include <string>

#include "fabric/verbs/path_endpoint.hpp"
#include "fabric/verbs/verbs_device.hpp"

namespace kvxfer::verbs {

// What switches sort a path's packets by.
struct TrafficMarks {
  std::uint8_t traffic_class = 0;
  std::uint8_t service_level = 0;
};

// The way from a port to the other end.
ibv_ah_attr address_vector(const Port& port, const PathEndpoint& theirs, const TrafficMarks& marks);

class QueuePair {
 public:
  // For `sends` writes at a time, requests for windows, and one more to mark the end.
  static Result<std::shared_ptr<QueuePair>> create(std::shared_ptr<const VerbsDevice> device,
                                                   const Port& port, ibv_cq* completions,
                                                   ibv_srq* receives, std::uint32_t sends);
  ~QueuePair() { destroy(); }
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  // Both return 0, or an errno. The first may wait for the network, on any thread; nothing of the
  // other end's is placed until the second. `ours` is what the other end was told.
  int join(const ibv_ah_attr& way, const PathEndpoint& ours, const PathEndpoint& theirs);
  int start(const PathEndpoint& ours);
  bool started() const { return started_; }
  // Nothing is sent or taken from now on; what is under way ends with errors, soon.
  void stop();
  // After this the NIC does nothing for it any more. Idempotent.
  void destroy();

  ibv_qp* get() const { return pair_; }
  std::uint32_t number() const { return number_; }
  std::uint32_t max_inline() const { return max_inline_; }

 private:
  QueuePair(std::shared_ptr<const VerbsDevice> device, ibv_qp* pair, std::uint32_t max_inline)
      : device_(std::move(device)), pair_(pair), number_(pair->qp_num), max_inline_(max_inline) {}
  int modify(ibv_qp_attr attributes, int mask);

  std::shared_ptr<const VerbsDevice> device_;
  ibv_qp* pair_;
  std::uint32_t number_;
  std::uint32_t max_inline_;
  bool started_ = false;
};

}  // namespace kvxfer::verbs
