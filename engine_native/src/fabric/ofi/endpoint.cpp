#include "fabric/ofi/endpoint.hpp"

#include <algorithm>

#include "clock.hpp"
#include "operation.hpp"
#include "random.hpp"

namespace kvxfer::ofi {
namespace {

constexpr std::size_t kMaxAddressBytes = 256;
// By then nothing is left in the network of a path that was shut.
constexpr std::uint64_t kForgetNs = 10'000'000'000u;

}  // namespace

Result<std::unique_ptr<Endpoint>> Endpoint::open(std::shared_ptr<const OpenDomain> domain,
                                                 Poller& poller, const Options& options) {
  std::unique_ptr<Endpoint> made(new Endpoint(std::move(domain), poller, options));
  if (auto good = made->start(); !good) return good.error();
  return made;
}

Endpoint::Endpoint(std::shared_ptr<const OpenDomain> domain, Poller& poller, const Options& options)
    : domain_(std::move(domain)), poller_(poller), options_(options) {
  if (options_.disorder_seed) disorder_.emplace(*options_.disorder_seed);
  random_bytes(&token_, sizeof token_);
}

Endpoint::~Endpoint() {
  if (wait_fd_ >= 0) poller_.remove(wait_fd_, *this);
}

Result<void> Endpoint::open_queue() {
  const std::size_t immediates = options_.budget.paths * (options_.budget.immediates + 1);
  // Nothing guards a queue against running over; receives end up there too when it is closed.
  fi_cq_attr attributes{};
  attributes.size = options_.budget.writes + 2 * immediates;
  attributes.format = FI_CQ_FORMAT_DATA;
  attributes.wait_obj = options_.wait_object ? FI_WAIT_FD : FI_WAIT_NONE;
  fid_cq* queue = nullptr;
  int error = ::fi_cq_open(domain_->domain.get(), &attributes, &queue, nullptr);
  if (error != 0 && options_.wait_object) {
    attributes.wait_obj = FI_WAIT_NONE;
    error = ::fi_cq_open(domain_->domain.get(), &attributes, &queue, nullptr);
  }
  if (error != 0) {
    return domain_->library.failed("NIC " + domain_->device.name + ": fi_cq_open of " +
                                       std::to_string(attributes.size) + " entries",
                                   error);
  }
  queue_.reset(queue);
  int fd = -1;
  if (attributes.wait_obj != FI_WAIT_FD || ::fi_control(&queue->fid, FI_GETWAIT, &fd) != 0) {
    return {};
  }
  // Linux refuses where too many queues wait for one device: then as if it had none.
  if (poller_.add(fd, EPOLLIN, *this)) wait_fd_ = fd;
  return {};
}

Result<void> Endpoint::start() {
  const auto failed = [&](const char* what, ssize_t error) {
    return domain_->library.failed("NIC " + domain_->device.name + ": " + what, error);
  };
  if (domain_->local_keys) {
    auto readable =
        domain_->register_memory(landing_.data(), landing_.size(), FI_WRITE | FI_SEND | FI_RECV);
    if (!readable) return readable.error();
    landing_readable_ = std::move(*readable);
  }
  if (auto good = open_queue(); !good) return good;

  fi_av_attr attributes{};
  attributes.type = FI_AV_TABLE;
  attributes.count = options_.budget.paths;
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
  const Budget& budget = options_.budget;
  context_count_ = budget.writes + (receives ? budget.paths * (budget.immediates + 1) : 0);
  contexts_ = std::make_unique<Context[]>(context_count_);
  for (std::size_t i = 0; i < context_count_; ++i) {
    contexts_[i].receive = i >= budget.writes;
    put_back(contexts_[i]);
  }
  post_receives();
  if (unposted_) {
    return Error{Errc::out_of_memory, "NIC " + domain_->device.name + " does not take " +
                                          std::to_string(context_count_ - budget.writes) +
                                          " receives"};
  }
  return {};
}

Result<Endpoint::Landing> Endpoint::make_landing() const {
  auto writable = domain_->register_memory(landing_.data(), landing_.size(), FI_REMOTE_WRITE);
  if (!writable) return writable.error();
  const std::uint64_t key = ::fi_mr_key(writable->get());
  return Landing{.writable = std::move(*writable),
                 .address = domain_->remote_start(landing_.data()),
                 .rkey = key};
}

// --- paths -----------------------------------------------------------------------------------

Result<fi_addr_t> Endpoint::attach(CompletionSink& path, const std::string& address,
                                   std::uint64_t token) {
  if (address.size() != address_.size()) {
    return Error{Errc::protocol_error, "the peer's address is none of NIC " + domain_->device.name +
                                           "'s provider; use the same ofi_provider on both sides"};
  }
  fi_addr_t number = FI_ADDR_NOTAVAIL;
  const int inserted = ::fi_av_insert(peers_.get(), address.data(), 1, &number, 0, nullptr);
  if (inserted != 1 || sources_.contains(number)) {
    return domain_->library.failed(
        "NIC " + domain_->device.name + " cannot take the peer's address",
        inserted < 0 ? inserted : -FI_EINVAL);
  }
  sources_[number] = {&path, token};
  std::erase_if(met_, [now = now_ns()](const auto& known) { return known.second <= now; });
  met_[token] = UINT64_MAX;  // not while the path is there
  return number;
}

void Endpoint::detach(CompletionSink& path) {
  for (auto source = sources_.begin(); source != sources_.end(); ++source) {
    if (source->second.path != &path) continue;
    fi_addr_t number = source->first;
    ::fi_av_remove(peers_.get(), &number, 1, 0);
    met_[source->second.token] = now_ns() + kForgetNs;
    sources_.erase(source);
    break;
  }
  for (std::size_t i = 0; i < context_count_; ++i) {
    if (contexts_[i].path == &path) contexts_[i].path = nullptr;
  }
}

bool Endpoint::met(std::uint64_t token) const {
  const auto known = met_.find(token);
  return known != met_.end() && now_ns() < known->second;
}

bool Endpoint::writes_for(const CompletionSink& path) const {
  return std::any_of(contexts_.get(), contexts_.get() + context_count_,
                     [&](const Context& context) { return context.path == &path; });
}

std::string Endpoint::seed_text() const {
  return disorder_ ? " (seed " + std::to_string(disorder_->seed()) + ")" : "";
}

// --- writes ----------------------------------------------------------------------------------

ssize_t Endpoint::post(const Write& write) {
  // What EFA does not take.
  if (disorder_ && (write.length == 0 || write.length > kMaxWriteBytes || !write.descriptor)) {
    return -FI_EINVAL;
  }
  const std::lock_guard lock(gate_);
  if (!endpoint_) return -FI_ESHUTDOWN;
  if (!free_) return -FI_EAGAIN;
  Context& context = *free_;
  const iovec from{.iov_base = const_cast<void*>(write.source), .iov_len = write.length};
  const fi_rma_iov to{.addr = write.address, .len = write.length, .key = write.rkey};
  void* descriptor = write.descriptor;
  const fi_msg_rma message{.msg_iov = &from,
                           .desc = &descriptor,
                           .iov_count = 1,
                           .addr = write.to,
                           .rma_iov = &to,
                           .rma_iov_count = 1,
                           .context = &context.space,
                           .data = write.imm.value_or(0)};
  const std::uint64_t flags =
      FI_COMPLETION | FI_DELIVERY_COMPLETE | (write.imm ? FI_REMOTE_CQ_DATA : 0);
  Context* const next = context.next;
  context.path = write.path;
  context.sequence = write.sequence;
  const ssize_t error = ::fi_writemsg(endpoint_.get(), &message, flags);
  if (error != 0) {
    context.path = nullptr;
    refused_ = refused_ || error == -FI_EAGAIN;
    return error;
  }
  free_ = next;
  ++in_flight_;
  return 0;
}

void Endpoint::put_back(Context& context) {
  Context*& list = context.receive ? unposted_ : free_;
  context.path = nullptr;
  context.next = list;
  list = &context;
}

void Endpoint::post_receives() {
  const std::lock_guard lock(gate_);
  while (unposted_ && endpoint_) {
    Context& context = *unposted_;
    Context* const next = context.next;
    const ssize_t error = ::fi_recv(endpoint_.get(), landing_.data(), landing_.size(),
                                    landing_descriptor(), FI_ADDR_UNSPEC, &context.space);
    if (error != 0) return;  // at the next poll
    unposted_ = next;
  }
}

Endpoint::Context* Endpoint::context_of(void* space) const {
  const auto first = reinterpret_cast<std::uintptr_t>(contexts_.get());
  const auto at = reinterpret_cast<std::uintptr_t>(space);
  if (at < first || at >= first + context_count_ * sizeof(Context)) return nullptr;
  return (at - first) % sizeof(Context) == 0 ? static_cast<Context*>(space) : nullptr;
}

}  // namespace kvxfer::ofi
