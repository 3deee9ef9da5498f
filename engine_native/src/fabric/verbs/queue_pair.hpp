// One reliable-connected queue pair.
#pragma once

#include <memory>
#include <string>

#include "fabric/verbs/path_endpoint.hpp"
#include "fabric/verbs/verbs_device.hpp"

namespace kvxfer::verbs {

// The packet fields by which switches classify a path's traffic.
struct TrafficMarks {
  std::uint8_t traffic_class = 0;
  std::uint8_t service_level = 0;
};

// Returns the route from a port to the other end.
ibv_ah_attr address_vector(const Port& port, const PathEndpoint& theirs, const TrafficMarks& marks);

class QueuePair {
 public:
  // Creates a queue pair for `sends` writes at a time, requests for windows, and one request to
  // mark the end.
  static Result<std::shared_ptr<QueuePair>> create(std::shared_ptr<const VerbsDevice> device,
                                                   const Port& port, ibv_cq* completions,
                                                   ibv_srq* receives, std::uint32_t sends);
  ~QueuePair() { destroy(); }
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  // Joins the queue pair to the other end, then starts it; both return 0 or an errno. join() may
  // wait for the network, on any thread; no write of the other end is placed before start(). `ours`
  // is the endpoint sent to the other end.
  int join(const ibv_ah_attr& way, const PathEndpoint& ours, const PathEndpoint& theirs);
  int start(const PathEndpoint& ours);
  bool started() const { return started_; }
  // Stops sending and receiving; requests under way soon end with errors.
  void stop();
  // Destroys the queue pair: the NIC does nothing more for it. Idempotent.
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
