// How an endpoint reads its completion queue.
#include <algorithm>
#include <array>

#include "fabric/ofi/endpoint.hpp"

namespace kvxfer::ofi {
namespace {

constexpr std::size_t kCompletionBatch = 64;
// Of one endpoint at one poll, so that no other waits for long.
constexpr int kBatches = 8;

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
      return "; its memory region may be registered no more";
    case FI_EMSGSIZE:
      return "; the provider does not take writes of 1 MiB";
    default:
      return "";
  }
}

}  // namespace

Result<void> Endpoint::poll() {
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
    for (const auto& [number, source] : sources_) {
      source.path->on_failed(
          {Errc::nic_lost, "its endpoint was closed, so that nothing late lands"});
    }
  }
  if (read >= 0 || read == -FI_EAGAIN) return {};
  return domain_->library.failed("NIC " + domain_->device.name + ": its completion queue is broken",
                                 read);
}

bool Endpoint::prepare_sleep() {
  if ((disorder_ && !disorder_->empty()) || (unposted_ && open())) return false;
  if (!has_wait_object()) return true;
  fid* queue = &queue_->fid;
  return ::fi_trywait(domain_->fabric.get(), &queue, 1) == 0;
}

void Endpoint::take_completions(CompletionSink& of) {
  // No more than the queue holds: with a shared endpoint others keep filling it.
  const std::size_t size =
      options_.budget.writes + 2 * options_.budget.paths * (options_.budget.immediates + 1);
  for (std::size_t taken = 0; taken < size;) {
    const ssize_t read = read_completions();
    if (read < 0) break;
    taken += static_cast<std::size_t>(std::max<ssize_t>(read, 1));
  }
  if (disorder_) {
    for (const Completion& completion : disorder_->release(of)) report(completion);
  }
  report_immediates();
}

ssize_t Endpoint::read_completions() {
  std::array<fi_cq_data_entry, kCompletionBatch> entries;
  std::array<fi_addr_t, kCompletionBatch> sources;
  sources.fill(FI_ADDR_NOTAVAIL);
  ssize_t read = 0;
  {
    const std::lock_guard lock(gate_);  // reading may place bytes
    read = ::fi_cq_readfrom(queue_.get(), entries.data(), kCompletionBatch, sources.data());
  }
  if (read == -FI_EAVAIL) {
    read_errors();  // until then nobody's completions can be seen
    return 0;
  }
  for (ssize_t i = 0; i < read; ++i) {
    const auto at = static_cast<std::size_t>(i);
    take(entries[at], sources[at]);
  }
  return read;
}

void Endpoint::take(const fi_cq_data_entry& entry, fi_addr_t source) {
  if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
    allow_close();  // it is connected
    // It consumed a receive only if it says which; its context means nothing otherwise.
    Context* const receive =
        domain_->device.mode(FI_RX_CQ_DATA) ? context_of(entry.op_context) : nullptr;
    if (receive && receive->receive) put_back(*receive);
    const bool told = (domain_->device.info->caps & FI_SOURCE) != 0;
    // Whoever is not known, or not any more, may not count.
    const auto found = told ? sources_.find(source) : sources_.begin();
    if (found == sources_.end() || (!told && sources_.size() != 1)) return;
    return pass(
        {.path = found->second.path, .imm = static_cast<Imm>(entry.data), .bytes = entry.len});
  }
  Context* const context = context_of(entry.op_context);
  if (!context) return;
  const Completion completion{.path = context->path, .sequence = context->sequence};
  const bool write = !context->receive;
  put_back(*context);
  if (!write) return;  // a message, which nobody has reason to send
  --in_flight_;
  if (completion.path) pass(completion);
}

void Endpoint::read_errors() {
  ErrorEntry entry{};
  while (::fi_cq_readerr(queue_.get(), &entry, 0) == 1) {
    // On the receiving side the context means nothing.
    const bool ours = (entry.flags & (FI_REMOTE_WRITE | FI_REMOTE_READ)) == 0;
    Context* const context = ours ? context_of(entry.op_context) : nullptr;
    CompletionSink* path = nullptr;
    if (context) {
      path = context->path;
      const bool write = !context->receive;
      put_back(*context);
      if (write) --in_flight_;
    } else if (options_.budget.paths == 1 && !sources_.empty()) {
      path = sources_.begin()->second.path;
    }
    if (path && open()) {
      std::array<char, 256> text{};
      const char* const detail = ::fi_cq_strerror(queue_.get(), entry.prov_errno, entry.err_data,
                                                  text.data(), text.size());
      std::string why = domain_->library.strerror(entry.err);
      if (detail && *detail && why != detail) why += ", " + std::string(detail);
      path->on_failed({Errc::nic_lost, std::string(context ? "a write was not delivered: "
                                                           : "the path is broken: ") +
                                           why + std::string(remedy(entry.err)) + seed_text()});
    }
    entry = {};
  }
}

void Endpoint::pass(const Completion& completion) {
  disorder_ ? disorder_->hold(completion) : report(completion);
}

void Endpoint::report(const Completion& completion) {
  if (!completion.imm) return completion.path->on_written(completion.sequence);
  if (run_length_ > 0 && (run_.path != completion.path || run_.imm != completion.imm)) {
    report_immediates();
  }
  if (run_length_++ == 0) run_ = {.path = completion.path, .imm = completion.imm};
  run_.bytes += completion.bytes;
}

void Endpoint::report_immediates() {
  if (run_length_ == 0) return;
  run_.path->on_arrived(*run_.imm, std::exchange(run_length_, 0), run_.bytes);
}

}  // namespace kvxfer::ofi
