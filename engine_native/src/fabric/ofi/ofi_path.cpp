#include "fabric/ofi/ofi_path.hpp"

#include <algorithm>

#include "clock.hpp"
#include "fabric/ofi/ofi_domain.hpp"
#include "fabric/ofi/path_endpoint.hpp"

namespace kvxfer::ofi {
namespace {

// Under way on one path, so that peers who do not answer leave room for the others.
constexpr std::size_t kMaxWritesOfPath = 512;
// At once; the others of a peer get their turn then.
constexpr std::size_t kWriteBatch = 64;
// libfabric's efa-direct (up to 2.5) does not get writes without bytes right.
constexpr std::uint32_t kLandingBytes = 1;
// No counter and no batch has these.
constexpr Imm kGreeting = 0;
constexpr std::uint64_t kGreetingSequence = 0;
constexpr std::uint64_t kFlushSequence = UINT64_MAX;

}  // namespace

OfiPath::OfiPath(NicPathIdentity identity, OfiDomain& domain, Endpoint& endpoint,
                 Endpoint::Landing landing)
    : NicPath(std::move(identity), kImmWindow, domain.load(), domain.context().receive_context,
              domain.context().events),
      domain_(domain),
      endpoint_(&endpoint),
      landing_(std::move(landing)) {
  domain_.add(*this);
}

std::string OfiPath::endpoint() const {
  told_ = true;
  return PathEndpoint{.token = endpoint_->token(),
                      .landing_address = landing_.address,
                      .landing_key = landing_.rkey,
                      .imm_window = kImmWindow,
                      .address = endpoint_->address()}
      .encode();
}

void OfiPath::connect(std::string_view endpoint, Connected then) { then(join(endpoint)); }

Result<void> OfiPath::join(std::string_view endpoint) {
  const auto theirs = PathEndpoint::decode(endpoint);
  if (!theirs) return Error{Errc::protocol_error, "malformed ofi endpoint"};
  landing_address_ = theirs->landing_address;
  landing_key_ = theirs->landing_key;
  if (endpoint_->met(theirs->token)) {
    if (told_) return Error{Errc::protocol_error, "the peer offers an endpoint a second time"};
    auto fresh = domain_.exchange(*endpoint_, theirs->token);
    if (!fresh) return fresh.error();
    endpoint_ = fresh->endpoint;
    landing_ = std::move(fresh->landing);
  }
  const auto to = endpoint_->attach(*this, theirs->address, theirs->token);
  if (!to) return to.error();
  to_ = *to;
  set_peer_imm_window(theirs->imm_window);
  may_greet_ = told_;
  if (may_greet_) endpoint_->allow_close();
  return {};
}

ssize_t OfiPath::post_to_landing(std::uint64_t sequence, std::optional<Imm> imm) {
  return endpoint_->post({.path = this,
                          .sequence = sequence,
                          .to = to_,
                          .source = endpoint_->landing(),
                          .descriptor = endpoint_->landing_descriptor(),
                          .length = kLandingBytes,
                          .address = landing_address_,
                          .rkey = landing_key_,
                          .imm = imm});
}

void OfiPath::step() {
  if (!endpoint_ || lost()) return;
  if (may_greet_ && !greeted_) greet();
  if (flushes_ && flushing_ == 0 && flushes_->wanted > flushed_) flush();
}

void OfiPath::greet() {
  // From then on the peer may write.
  if (domain_.flushes() && !flushes_) {
    flushes_ = domain_.flushes()->add(identity().peer, *endpoint_);
  }
  greeted_ = took(post_to_landing(kGreetingSequence, kGreeting));
}

void OfiPath::flush() {
  const std::uint64_t wanted = flushes_->wanted;
  if (took(post_to_landing(kFlushSequence, std::nullopt))) flushing_ = wanted;
}

bool OfiPath::has_room(bool counted) const {
  return heard_ && NicPath::has_room(counted) && endpoint_ && in_flight_ < kMaxWritesOfPath &&
         endpoint_->has_room();
}

std::size_t OfiPath::post(const OperationPtr& operation, const WriteRange& writes) {
  const std::size_t limit =
      batch_limit(operation, writes, std::min(kWriteBatch, kMaxWritesOfPath - in_flight_));
  std::size_t count = 0;
  while (count < limit) {
    const std::size_t index = writes.first + count;
    const WireWrite& write = operation->writes[index];
    if (!took(post_one(*operation, write, writes.counted))) break;
    add_batch(operation, {index, 1, writes.counted}, write.length);
    ++in_flight_;
    ++next_sequence_;
    ++count;
  }
  return count;
}

ssize_t OfiPath::post_one(const Operation& operation, const WireWrite& write, bool counted) {
  const std::optional<Imm> imm = counted ? operation.imm : std::nullopt;
  if (write.length == 0) return post_to_landing(next_sequence_, imm);
  const auto* registration =
      static_cast<const OfiRegistration*>(operation.source->registration(identity().nic));
  const RemoteKey& key = remote_key(operation);
  return endpoint_->post({.path = this,
                          .sequence = next_sequence_,
                          .to = to_,
                          .source = operation.source->data() + write.source,
                          .descriptor = registration->descriptor(),
                          .length = write.length,
                          .address = key.address + write.destination,
                          .rkey = key.rkey,
                          .imm = imm});
}

// A provider that cannot reach a peer may answer "later" for ever. It also does where the queue is
// full of writes to others.
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
  // After a while in which nothing was asked it is another matter.
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
  if (sequence == kGreetingSequence) return;
  if (sequence == kFlushSequence) {
    flushed_ = std::exchange(flushing_, 0);
    return domain_.flushes()->finish(*flushes_, flushed_);
  }
  --in_flight_;
  finish(sequence);
}

void OfiPath::on_arrived(Imm imm, std::uint64_t writes, std::uint64_t bytes) {
  if (imm == kGreeting && !heard_) {
    heard_ = true;
    may_greet_ = true;
    ++domain_.context().receive_context.activity;  // there may be room now
    if (--writes == 0) return;
  }
  count_immediates(imm, writes, bytes);
}

void OfiPath::on_failed(Error error) {
  if (shutting_) return;
  error.text = "NIC " + domain_.info().name + " to peer " + identity().label + ": " + error.text;
  lose(std::move(error));
}

void OfiPath::shut(std::function<void()> then) {
  shutting_ = true;
  Endpoint& endpoint = *std::exchange(endpoint_, nullptr);
  // The fence; then what had arrived before it is counted.
  domain_.fence(endpoint, identity().peer);
  if (flushes_) domain_.flushes()->remove(*flushes_);
  landing_.writable.reset();  // no greeting is accepted any more
  endpoint.take_completions(*this);
  if (in_flight_ > 0 && endpoint.writes_for(*this)) {
    // Others share it, and the NIC may still read what nobody waits for any more.
    endpoint.reset();
    endpoint.take_completions(*this);
  }
  endpoint.detach(*this);
  domain_.remove(*this);
  domain_.release(endpoint);
  then();
}

}  // namespace kvxfer::ofi
