#include "fabric/ofi/ofi_path.hpp"

#include <algorithm>

#include "clock.hpp"
#include "fabric/ofi/ofi_domain.hpp"
#include "fabric/ofi/path_endpoint.hpp"

namespace kvxfer::ofi {
namespace {

// The most writes posted at a time, so that other paths of the peer get their turn.
constexpr std::size_t kWriteBatch = 64;
// libfabric's efa-direct (up to 2.5) mishandles writes without bytes.
constexpr std::uint32_t kLandingBytes = 1;
// An immediate and sequences that no counter and no batch has.
constexpr Imm kGreeting = 0;
constexpr std::uint64_t kGreetingSequence = 0;
constexpr std::uint64_t kFlushSequence = UINT64_MAX;

}  // namespace

OfiPath::OfiPath(NicPathIdentity identity, OfiDomain& domain, std::shared_ptr<Endpoint> endpoint)
    : NicPath(std::move(identity), endpoint->immediates(), domain.load(),
              domain.context().receive_context, domain.context().events),
      domain_(domain),
      endpoint_(std::move(endpoint)) {
  endpoint_->serve(*this, domain_.context().poller);
  domain_.add(*this);
}

std::string OfiPath::endpoint() const {
  told_ = true;
  return PathEndpoint{.landing_address = endpoint_->landing_address(),
                      .landing_key = endpoint_->landing_key(),
                      .imm_window = endpoint_->immediates(),
                      .address = endpoint_->address()}
      .encode();
}

void OfiPath::connect(std::string_view endpoint, Connected then) {
  thread_.check("OfiPath");
  const auto theirs = PathEndpoint::decode(endpoint);
  if (!theirs) return then(Error{Errc::protocol_error, "malformed ofi endpoint"});
  joining_ = true;
  then_connected_ = std::move(then);
  domain_.context().background.run<Result<void>>(
      [endpoint = endpoint_, address = theirs->address] { return endpoint->attach(address); },
      [this, theirs = *theirs](Result<void> joined) { on_joined(std::move(joined), theirs); });
}

void OfiPath::on_joined(Result<void> joined, const PathEndpoint& theirs) {
  joining_ = false;
  if (shutting_) return stop();
  if (joined) {
    joined_ = true;
    landing_address_ = theirs.landing_address;
    landing_key_ = theirs.landing_key;
    set_peer_imm_window(theirs.imm_window);
    may_greet_ = may_greet_ || told_;
  }
  std::exchange(then_connected_, nullptr)(std::move(joined));
}

ssize_t OfiPath::post_to_landing(std::uint64_t sequence, std::optional<Imm> imm) {
  return endpoint_->post({.sequence = sequence,
                          .source = endpoint_->landing(),
                          .descriptor = endpoint_->landing_descriptor(),
                          .length = kLandingBytes,
                          .address = landing_address_,
                          .rkey = landing_key_,
                          .imm = imm});
}

void OfiPath::poll() {
  thread_.check("OfiPath");
  if (closing_) return;
  endpoint_->poll();
  if (shutting_ && !joining_) return stop();
  if (shutting_ || lost() || sealed()) return;
  if (joined_ && may_greet_ && !greeted_) greet();
  if (flushes_ && flushing_ == 0 && flushes_->wanted > flushed_) flush();
}

void OfiPath::greet() {
  // The peer may write from the greeting on.
  if (domain_.flushes() && !flushes_) {
    flushes_ = domain_.flushes()->add(identity().peer, *endpoint_);
  }
  greeted_ = took(post_to_landing(kGreetingSequence, kGreeting));
}

void OfiPath::flush() {
  const std::uint64_t wanted = flushes_->wanted;
  if (took(post_to_landing(kFlushSequence, std::nullopt))) flushing_ = wanted;
}

bool OfiPath::has_room(const Operation& operation, bool counted) const {
  return NicPath::has_room(operation, counted) && !shutting_ && in_flight_ < kMaxWritesOfPath &&
         endpoint_->has_room();
}

std::size_t OfiPath::post(const OperationPtr& operation, const WriteRange& writes) {
  thread_.check("OfiPath");
  const std::size_t limit =
      batch_limit(operation, writes, std::min(kWriteBatch, kMaxWritesOfPath - in_flight_));
  std::size_t count = 0;
  while (count < limit) {
    const std::size_t index = writes.first + count;
    const WireWrite& write = operation->writes[index];
    if (!took(post_one(*operation, write, writes.counted, count + 1 < limit))) break;
    add_batch(operation, {index, 1, writes.counted}, write.length);
    ++in_flight_;
    ++next_sequence_;
    ++count;
  }
  return count;
}

ssize_t OfiPath::post_one(const Operation& operation, const WireWrite& write, bool counted,
                          bool more) {
  const std::optional<Imm> imm = counted ? operation.imm : std::nullopt;
  if (write.length == 0) return post_to_landing(next_sequence_, imm);
  const auto* registration =
      static_cast<const OfiRegistration*>(operation.source->registration(identity().nic));
  const RemoteKey& key = remote_key(operation);
  return endpoint_->post({.sequence = next_sequence_,
                          .source = operation.source->address() + write.source,
                          .descriptor = registration->descriptor(),
                          .length = write.length,
                          .address = key.address + write.destination,
                          .rkey = key.rkey,
                          .imm = imm,
                          .more = more});
}

// A provider that cannot reach a peer may return -FI_EAGAIN for ever. It also does while the queue
// is full of writes to others.
bool OfiPath::took(ssize_t error) {
  if (error == 0) {
    refused_last_ns_ = 0;
    return true;
  }
  if (error != -FI_EAGAIN) {
    on_failed({Errc::nic_lost, "a write is refused: " + domain_.text_of(error)});
    return false;
  }
  const auto patience = static_cast<std::uint64_t>(domain_.context().options.peer_timeout.count());
  const std::uint64_t now = now_ns();
  // After a pause in which nothing was tried, the time begins anew.
  if (now - refused_last_ns_ > patience / 2) refused_since_ns_ = now;
  refused_last_ns_ = now;
  if (endpoint_->in_flight() > 0 || now - refused_since_ns_ < patience) return false;
  on_failed({Errc::nic_lost, "no write was accepted for " +
                                 std::to_string((now - refused_since_ns_) / 1'000'000) +
                                 " ms; check that the peer's process runs and that the network "
                                 "between both hosts lets it through"});
  return false;
}

void OfiPath::on_written(std::uint64_t sequence) {
  if (sequence == kGreetingSequence) {
    greeting_arrived_ = true;
    ++domain_.context().receive_context.activity;
    return;
  }
  if (sequence == kFlushSequence) {
    flushed_ = std::exchange(flushing_, 0);
    return domain_.flushes()->finish(*flushes_, flushed_);
  }
  --in_flight_;
  finish(sequence);
}

void OfiPath::on_arrived(Imm imm, std::uint64_t count) {
  if (imm == kGreeting && !heard_) {
    heard_ = true;
    may_greet_ = true;
    ++domain_.context().receive_context.activity;
    if (--count == 0) return;
  }
  count_immediates(imm, count);
}

// AWS's security groups drop all traffic that no rule permits. EFA's traffic is not IP, so no rule
// for addresses or ports permits it.
std::string_view OfiPath::likely_cause() const {
  return domain_.info().network == "ofi-efa"
             ? "the security group of each instance has to permit all traffic from and to itself, "
               "inbound and outbound, by rules that name the group"
             : "check that the network between both hosts lets libfabric's traffic through";
}

void OfiPath::on_failed(Error error) {
  if (shutting_) return;
  error.text = "NIC " + domain_.info().name + " to peer " + identity().label + ": " + error.text;
  lose(std::move(error));
}

void OfiPath::shut(std::function<void()> then) {
  thread_.check("OfiPath");
  then_shut_ = std::move(then);
  then_connected_ = nullptr;
  shutting_ = true;
  const auto patience = static_cast<std::uint64_t>(domain_.context().options.peer_timeout.count());
  stop_by_ns_ = now_ns() + patience / 4;
  if (!joining_) stop();  // else on_joined() continues
}

// Closes the endpoint, after a wait for completions: a peer that leaves has counted writes whose
// completions have yet to come. Once sealed, the path waits for none.
void OfiPath::stop() {
  if (closing_ || (!sealed() && endpoint_->in_flight() > 0 && now_ns() < stop_by_ns_)) return;
  closing_ = true;
  domain_.context().background.fence([endpoint = endpoint_] { endpoint->close(); },
                                     [this] { end(); });
}

// Ends the path. Counts what had arrived before the fence, if the provider keeps it.
void OfiPath::end() {
  endpoint_->take_completions();
  if (flushes_) domain_.flushes()->remove(*flushes_);
  domain_.remove(*this);
  domain_.take_back(std::move(endpoint_));
  NicPath::end(std::exchange(then_shut_, nullptr));
}

}  // namespace kvxfer::ofi
