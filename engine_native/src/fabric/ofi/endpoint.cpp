#include "fabric/ofi/endpoint.hpp"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "clock.hpp"
#include "fabric/ofi/tcp_listener.hpp"
#include "operation.hpp"

namespace kvxfer::ofi {
namespace {

constexpr std::size_t kMaxAddressBytes = 256;
constexpr std::size_t kCompletionBatch = 64;
// The most batches of completions of an endpoint in one poll, so that no other waits long.
constexpr int kBatches = 8;
// libfabric ends a shut connection as soon as it sees it.
constexpr std::uint64_t kEndConnectionsNs = 1'000'000'000u;

std::string_view remedy(int error) {
  switch (error) {
    case FI_ECONNREFUSED:
    case FI_ECONNRESET:
    case FI_ECONNABORTED:
    case FI_ENOTCONN:
    case FI_ESHUTDOWN:
    case FI_EIO:
      return "; its process has ended, or it closed the path";
    case FI_EHOSTUNREACH:
    case FI_ENETUNREACH:
    case FI_EHOSTDOWN:
    case FI_ENETDOWN:
    case FI_ETIMEDOUT:
      return "; check the network between both hosts and the NIC's security group";
    case FI_EACCES:
    case FI_EPERM:
    case FI_ENOKEY:
    case FI_EKEYREJECTED:
    case FI_EFAULT:
      return "; its memory region may no longer be registered";
    case FI_EMSGSIZE:
      return "; the provider does not take writes of 1 MiB";
    default:
      return "";
  }
}

}  // namespace

Result<std::shared_ptr<Endpoint>> Endpoint::open(std::shared_ptr<const OpenDomain> domain,
                                                 const Poller& poller, const Options& options) {
  std::shared_ptr<Endpoint> made(new Endpoint(std::move(domain), poller, options));
  if (auto good = made->start(); !good) return good.error();
  return made;
}

Endpoint::Endpoint(std::shared_ptr<const OpenDomain> domain, const Poller& poller,
                   const Options& options)
    : domain_(std::move(domain)), poller_(poller), options_(options) {
  if (options_.disorder_seed) disorder_.emplace(*options_.disorder_seed);
}

Error Endpoint::failed(std::string_view what, ssize_t error) const {
  return domain_->library.failed("NIC " + domain_->device.name + ": " + std::string(what), error);
}

Result<void> Endpoint::open_queue() {
  fi_cq_attr attributes{};
  attributes.size = queue_size();
  attributes.format = FI_CQ_FORMAT_DATA;
  attributes.wait_obj = options_.wait_object ? FI_WAIT_FD : FI_WAIT_NONE;
  fid_cq* queue = nullptr;
  int error = ::fi_cq_open(domain_->domain.get(), &attributes, &queue, nullptr);
  if (error != 0 && options_.wait_object) {
    attributes.wait_obj = FI_WAIT_NONE;
    error = ::fi_cq_open(domain_->domain.get(), &attributes, &queue, nullptr);
  }
  if (error != 0) {
    return failed("fi_cq_open of " + std::to_string(attributes.size) + " entries", error);
  }
  queue_.reset(queue);
  int fd = -1;
  if (attributes.wait_obj == FI_WAIT_FD && ::fi_control(&queue->fid, FI_GETWAIT, &fd) == 0) {
    wait_fd_ = fd;
  }
  return {};
}

Result<void> Endpoint::start() {
  auto registered = domain_->register_memory({.address = landing(), .size = landing_.size()},
                                             FI_WRITE | FI_SEND | FI_RECV | FI_REMOTE_WRITE);
  if (!registered) return registered.error();
  landing_memory_ = std::move(*registered);
  if (auto good = open_queue(); !good) return good;

  fi_av_attr attributes{};
  attributes.type = FI_AV_TABLE;
  attributes.count = 1;
  fid_av* peers = nullptr;
  if (const int error = ::fi_av_open(domain_->domain.get(), &attributes, &peers, nullptr)) {
    return failed("fi_av_open", error);
  }
  peers_.reset(peers);
  fid_ep* endpoint = nullptr;
  if (const int error =
          ::fi_endpoint(domain_->domain.get(), domain_->device.info.get(), &endpoint, nullptr)) {
    return failed("fi_endpoint", error);
  }
  endpoint_.reset(endpoint);
  domain_->endpoints->add(&endpoint->fid, failed_);
  if (domain_->device.takes_gpus) for_gpus_ = leave_gpus_to_nic();
  int error = ::fi_ep_bind(endpoint, &queue_->fid, FI_TRANSMIT | FI_RECV);
  if (error == 0) error = ::fi_ep_bind(endpoint, &peers->fid, 0);
  if (error == 0) error = ::fi_ep_bind(endpoint, &domain_->events->fid, 0);
  if (error == 0) error = ::fi_enable(endpoint);
  if (error != 0) return failed("fi_enable", error);

  address_.resize(kMaxAddressBytes);
  std::size_t size = address_.size();
  if (const int refused = ::fi_getname(&endpoint->fid, address_.data(), &size)) {
    return failed("fi_getname", refused);
  }
  address_.resize(size);

  const bool receives = domain_->device.mode(FI_RX_CQ_DATA);
  context_count_ = options_.writes + (receives ? options_.immediates + 1 : 0);
  contexts_ = std::make_unique<Context[]>(context_count_);
  for (std::size_t i = 0; i < context_count_; ++i) {
    contexts_[i].receive = i >= options_.writes;
    put_back(contexts_[i]);
  }
  post_receives();
  if (unposted_) {
    return Error{Errc::out_of_memory, "NIC " + domain_->device.name + " does not take " +
                                          std::to_string(context_count_ - options_.writes) +
                                          " receives"};
  }
  return {};
}

Result<void> Endpoint::leave_gpus_to_nic() const {
  fid* const endpoint = &endpoint_->fid;
  const int only = FI_HMEM_P2P_REQUIRED;
  if (const int error =
          ::fi_setopt(endpoint, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &only, sizeof only)) {
    return failed("it does not reach memory of GPUs itself", error);
  }
  const bool permitted = false;
  if (const int error = ::fi_setopt(endpoint, FI_OPT_ENDPOINT, kCudaCallsPermitted, &permitted,
                                    sizeof permitted)) {
    return failed("it needs calls of CUDA to reach memory of GPUs", error);
  }
  return {};
}

// --- life of the endpoint --------------------------------------------------------------------

Result<void> Endpoint::attach(const std::string& peer_address) {
  if (peer_address.size() != address_.size()) {
    return Error{Errc::protocol_error, "the peer's address is not one of the provider of NIC " +
                                           domain_->device.name +
                                           "; use the same ofi_provider on both sides"};
  }
  const int inserted = ::fi_av_insert(peers_.get(), peer_address.data(), 1, &to_, 0, nullptr);
  if (inserted == 1) return {};
  return failed("it cannot take the peer's address", inserted < 0 ? inserted : -FI_EINVAL);
}

void Endpoint::serve(CompletionSink& path, Poller& poller) {
  thread_.check("Endpoint");
  path_ = &path;
  // Linux refuses if too many queues wait for one device; then the queue counts as one without a
  // wait object.
  if (wait_fd_ >= 0 && !poller.add(wait_fd_, EPOLLIN, *this)) wait_fd_ = -1;
}

void Endpoint::leave(Poller& poller) {
  if (std::exchange(path_, nullptr) && wait_fd_ >= 0) poller.remove(wait_fd_, *this);
}

void Endpoint::close() {
  const std::lock_guard lock(gate_);
  if (endpoint_ && domain_->device.network == "ofi-tcp") end_connections();
  endpoint_.reset();
  domain_->endpoints->remove(failed_);
  closed_ = true;
}

// Ends the endpoint's connections. Reading no entry of the queue makes libfabric serve its sockets.
void Endpoint::end_connections() {
  const auto serve_sockets = [this] { ::fi_cq_read(queue_.get(), nullptr, 0); };
  TcpListener listener(address_);
  listener.shut();
  serve_sockets();  // connections that another thread was accepting exist now
  const std::uint64_t deadline = now_ns() + kEndConnectionsNs;
  while (listener.shut_accepted() > 0 && now_ns() < deadline) serve_sockets();
}

void Endpoint::reset() {
  close();
  poller_.wake();
}

// --- writes ----------------------------------------------------------------------------------

ssize_t Endpoint::post(const Write& write) {
  thread_.check("Endpoint");
  // Refuses writes that EFA does not take.
  if (disorder_ && (write.length == 0 || write.length > kMaxWriteBytes || !write.descriptor)) {
    return -FI_EINVAL;
  }
  const std::unique_lock lock(gate_, std::try_to_lock);
  if (!lock || !free_) return -FI_EAGAIN;
  if (!endpoint_) return -FI_ESHUTDOWN;
  Context& context = *free_;
  const iovec from{.iov_base = reinterpret_cast<void*>(write.source), .iov_len = write.length};
  const fi_rma_iov there{.addr = write.address, .len = write.length, .key = write.rkey};
  void* descriptor = write.descriptor;
  const fi_msg_rma message{.msg_iov = &from,
                           .desc = &descriptor,
                           .iov_count = 1,
                           .addr = to_,
                           .rma_iov = &there,
                           .rma_iov_count = 1,
                           .context = &context.space,
                           .data = write.imm.value_or(0)};
  // The provider may keep writes with FI_MORE until one without it, so there must be room for that
  // one.
  Context* const next = context.next;
  const bool more = write.more && next;
  const std::uint64_t flags = FI_COMPLETION | FI_DELIVERY_COMPLETE |
                              (write.imm ? FI_REMOTE_CQ_DATA : 0) | (more ? FI_MORE : 0);
  context.sequence = write.sequence;
  const ssize_t error = ::fi_writemsg(endpoint_.get(), &message, flags);
  chained_ = more && error == 0;
  if (error != 0) {
    refused_ = refused_ || error == -FI_EAGAIN;
    return error;
  }
  free_ = next;
  ++in_flight_;
  return 0;
}

void Endpoint::put_back(Context& context) {
  Context*& list = context.receive ? unposted_ : free_;
  context.next = list;
  list = &context;
}

void Endpoint::post_receives() {
  const std::unique_lock lock(gate_, std::try_to_lock);
  while (lock && unposted_ && endpoint_) {
    Context& context = *unposted_;
    Context* const next = context.next;
    const ssize_t error = ::fi_recv(endpoint_.get(), landing_.data(), landing_.size(),
                                    landing_descriptor(), FI_ADDR_UNSPEC, &context.space);
    if (error != 0) return;  // tried again at the next poll
    unposted_ = next;
  }
}

Endpoint::Context* Endpoint::context_of(void* space) const {
  const auto first = reinterpret_cast<std::uintptr_t>(contexts_.get());
  const auto at = reinterpret_cast<std::uintptr_t>(space);
  if (at < first || at >= first + context_count_ * sizeof(Context)) return nullptr;
  return (at - first) % sizeof(Context) == 0 ? static_cast<Context*>(space) : nullptr;
}

// --- completions -----------------------------------------------------------------------------

void Endpoint::poll() {
  thread_.check("Endpoint");
  if (disorder_ && chained_) {
    path_->on_failed({Errc::nic_lost, "writes wait for one without FI_MORE, which did not come"});
  }
  refused_ = false;
  ssize_t read = 0;
  for (int i = 0; i < kBatches; ++i) {
    read = read_completions();
    if (read < static_cast<ssize_t>(kCompletionBatch)) break;
  }
  if (disorder_) {
    for (const Completion& completion : disorder_->release()) report(completion);
  }
  report_immediates();
  if (unposted_) post_receives();
  if (!open()) {
    path_->on_failed({Errc::nic_lost, "its endpoint was closed, so that nothing late lands"});
  } else if (read < 0 && read != -FI_EAGAIN) {
    path_->on_failed(domain_->library.failed("its completion queue is broken", read));
  } else if (const int error = failed_) {
    path_->on_failed(domain_->library.failed("its endpoint failed", -error));
  }
}

bool Endpoint::prepare_sleep() {
  if ((disorder_ && !disorder_->empty()) || (unposted_ && open())) return false;
  if (!has_wait_object()) return true;
  fid* queue = &queue_->fid;
  return ::fi_trywait(domain_->fabric.get(), &queue, 1) == 0;
}

void Endpoint::take_completions() {
  thread_.check("Endpoint");
  // Reads no more than the queue holds.
  for (std::size_t left = queue_size(); left > 0 && read_completions() >= 0; --left) {
  }
  if (disorder_) {
    for (const Completion& completion : disorder_->release_all()) report(completion);
  }
  report_immediates();
}

ssize_t Endpoint::read_completions() {
  std::array<fi_cq_data_entry, kCompletionBatch> entries;
  ssize_t read = 0;
  {
    const std::unique_lock lock(gate_, std::try_to_lock);  // reading may place bytes
    if (!lock && open()) return -FI_EAGAIN;
    read = ::fi_cq_read(queue_.get(), entries.data(), kCompletionBatch);
  }
  if (read == -FI_EAVAIL) {
    read_errors();  // no completion can be read before
    return 0;
  }
  if (read <= 0) return read;
  for (const auto& entry : std::span(entries.data(), static_cast<std::size_t>(read))) take(entry);
  return read;
}

void Endpoint::take(const fi_cq_data_entry& entry) {
  if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
    // The immediate consumed a receive only if its context is one; otherwise its context means
    // nothing.
    Context* const receive =
        domain_->device.mode(FI_RX_CQ_DATA) ? context_of(entry.op_context) : nullptr;
    if (receive && receive->receive) put_back(*receive);
    return pass({.imm = static_cast<Imm>(entry.data)});
  }
  Context* const context = context_of(entry.op_context);
  if (!context) return;
  const std::uint64_t sequence = context->sequence;
  put_back(*context);
  if (context->receive) return;  // a message, which no peer has reason to send
  --in_flight_;
  pass({.sequence = sequence});
}

void Endpoint::read_errors() {
  ErrorEntry entry{};
  while (::fi_cq_readerr(queue_.get(), &entry, 0) == 1) {
    // On the receiving side the context means nothing.
    const bool ours = (entry.flags & (FI_REMOTE_WRITE | FI_REMOTE_READ)) == 0;
    Context* const context = ours ? context_of(entry.op_context) : nullptr;
    if (context) {
      put_back(*context);
      if (!context->receive) --in_flight_;
    }
    if (open()) {
      std::array<char, 256> text{};
      const char* const detail = ::fi_cq_strerror(queue_.get(), entry.prov_errno, entry.err_data,
                                                  text.data(), text.size());
      std::string why = domain_->library.strerror(entry.err);
      if (detail && *detail && why != detail) why += ", " + std::string(detail);
      if (disorder_) why += " (seed " + std::to_string(disorder_->seed()) + ")";
      path_->on_failed({Errc::nic_lost, std::string(context ? "a write was not delivered: "
                                                            : "the path is broken: ") +
                                            why + std::string(remedy(entry.err))});
    }
    entry = {};
  }
}

void Endpoint::pass(const Completion& completion) {
  disorder_ ? disorder_->hold(completion) : report(completion);
}

void Endpoint::report(const Completion& completion) {
  if (!completion.imm) return path_->on_written(completion.sequence);
  if (run_length_ > 0 && run_imm_ != *completion.imm) report_immediates();
  run_imm_ = *completion.imm;
  ++run_length_;
}

void Endpoint::report_immediates() {
  if (run_length_ == 0) return;
  path_->on_arrived(run_imm_, std::exchange(run_length_, 0));
}

}  // namespace kvxfer::ofi
