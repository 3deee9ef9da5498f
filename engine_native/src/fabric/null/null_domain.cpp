#include "fabric/null/null_domain.hpp"

#include <unistd.h>

#include <unordered_map>

#include "thread_owner.hpp"

namespace kvxfer::null {
namespace {

// Same as in VerbsPath.
constexpr std::size_t kMaxChain = 64;
constexpr unsigned kCountBits = 16;
constexpr std::uint64_t kCountMask = (1u << kCountBits) - 1;
constexpr std::size_t kPollBatch = 64;
// Receives of a path; many, because a receiver that is measured later does not poll meanwhile.
constexpr std::uint64_t kImmWindow = CompletionRing::kEntries / 2;

class NullRegistration final : public NicRegistration {
 public:
  Result<RemoteKey> share(PeerId) override { return RemoteKey{.valid = true}; }
  void unshare(PeerId) override {}
  Result<void> close() override { return {}; }
};

// The state that a NIC's paths share.
struct Shared {
  std::shared_ptr<NullNics> nics;
  CompletionRing completions;
};

class NullPath final : public NicPath {
 public:
  NullPath(NicPathIdentity identity, NicLoad& load, const NicContext& context, Shared& shared,
           std::unordered_map<std::uint32_t, NullPath*>& paths)
      : NicPath(std::move(identity), kImmWindow, load, context.receive_context, context.events),
        shared_(shared),
        paths_(paths),
        sends_(std::make_unique<SendQueue>(shared.completions)),
        number_(shared.nics->add(*sends_, shared.completions)) {
    set_peer_imm_window(kImmWindow);
    paths_[number_] = this;
  }
  ~NullPath() override {
    shared_.nics->remove(number_);
    paths_.erase(number_);
  }

  std::string_view fabric() const override { return "null"; }
  std::string endpoint() const override { return shared_.nics->endpoint(number_); }
  void connect(std::string_view endpoint, Connected then) override {
    thread_.check("NullPath");
    if (shared_.nics->join(number_, endpoint)) return then({});
    then(Error{Errc::nic_lost,
               "peer " + identity_.label + " is not on this engine's network of null NICs"});
  }
  void shut(std::function<void()> then) override {
    shared_.nics->remove(number_);
    then();
  }

  bool has_room(const Operation& operation, bool counted) const override {
    return sends_left_ >= kMaxGroupWrites && NicPath::has_room(operation, counted);
  }
  std::size_t post(const OperationPtr& operation, const WriteRange& writes) override {
    thread_.check("NullPath");
    const std::size_t count =
        batch_limit(operation, writes, std::min<std::size_t>(sends_left_, kMaxChain));
    if (count == 0) return 0;
    const bool counted = operation->imm && writes.counted;
    const std::byte* const source = operation->source ? operation->source->host() : nullptr;
    std::uint64_t bytes = 0;
    WorkRequest* request = nullptr;
    for (std::size_t i = 0; i < count; ++i) {
      const WireWrite& write = operation->writes[writes.first + i];
      request = &sends_->next();
      *request = {.source = reinterpret_cast<std::uint64_t>(source) + write.source,
                  .address = write.destination,
                  .rkey = operation->destination_key,
                  .completes = 0,
                  .length = write.length,
                  .imm = operation->imm.value_or(0),
                  .counted = counted && write.grouped == 0};
      bytes += write.length;
    }
    const Batch& batch = add_batch(operation, {writes.first, count, writes.counted}, bytes);
    request->completes = batch.sequence << kCountBits | count;
    sends_left_ -= static_cast<std::uint32_t>(count);
    sends_->ring_doorbell();
    return count;
  }

  void on_sent(std::uint64_t request) {
    sends_left_ += static_cast<std::uint32_t>(request & kCountMask);
    finish_through(request >> kCountBits);
  }
  void on_immediates(Imm imm, std::uint64_t count) { count_immediates(imm, count); }

 private:
  [[no_unique_address]] ThreadOwner thread_;
  Shared& shared_;
  std::unordered_map<std::uint32_t, NullPath*>& paths_;
  std::unique_ptr<SendQueue> sends_;
  std::uint32_t number_;
  std::uint32_t sends_left_ = SendQueue::kEntries;
};

class NullDomain final : public NicDomain, private EventSink {
 public:
  NullDomain(const NicContext& context, std::shared_ptr<NullNics> nics, bool keeps_order)
      : context_(context), keeps_order_(keeps_order), shared_{.nics = std::move(nics)} {}
  ~NullDomain() override {
    if (shared_.completions.event() >= 0) {
      context_.poller.remove(shared_.completions.event(), *this);
    }
    shared_.nics->remove(shared_.completions);
  }
  Result<void> open() {
    if (auto good = shared_.completions.open(); !good) return good;
    shared_.nics->add(shared_.completions);
    return context_.poller.add(shared_.completions.event(), EPOLLIN, *this);
  }

  std::string_view fabric() const override { return "null"; }
  const NicInfo& info() const override { return info_; }
  bool usable() const override { return true; }
  bool keeps_order() const override { return keeps_order_; }
  Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion&) override {
    return std::shared_ptr<NicRegistration>(std::make_shared<NullRegistration>());
  }
  void open_path(NicPathIdentity identity, Opened then) override {
    then(std::unique_ptr<NicPath>(
        std::make_unique<NullPath>(std::move(identity), load_, context_, shared_, paths_)));
  }

  // Takes completions in runs of one path and one immediate.
  void poll() override {
    thread_.check("NullDomain");
    CompletionRing& ring = shared_.completions;
    std::size_t taken = 0;
    while (taken < kPollBatch) {
      const Completion* entry = ring.front();
      if (!entry) break;
      const std::uint32_t number = entry->path;
      const std::uint64_t request = entry->request;
      const Imm imm = entry->imm;
      std::uint64_t run = 0;
      do {
        ++run;
        ring.pop();
        entry = ring.front();
      } while (entry && request == 0 && entry->request == 0 && entry->path == number &&
               entry->imm == imm && taken + run < kPollBatch);
      taken += run;
      const auto path = paths_.find(number);
      if (path == paths_.end()) continue;  // the path was shut
      request != 0 ? path->second->on_sent(request) : path->second->on_immediates(imm, run);
    }
    if (taken > 0) ring.give_back();
  }
  bool prepare_sleep() override {
    shared_.completions.arm();
    return shared_.completions.front() == nullptr;
  }
  void finish_sleep() override {}

 private:
  void on_events(std::uint32_t) override {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = ::read(shared_.completions.event(), &count, sizeof count);
  }

  [[no_unique_address]] ThreadOwner thread_;
  NicContext context_;
  bool keeps_order_;
  NicInfo info_{.name = "null", .network = "null", .bits_per_second = 1'000'000'000'000u};
  NicLoad load_{.bits_per_second = info_.bits_per_second};
  Shared shared_;
  std::unordered_map<std::uint32_t, NullPath*> paths_;  // keyed by number; owned by their links
};

}  // namespace

Result<OpenedNics> NullFactory::open(const NicContext& context) {
  auto domain = std::make_unique<NullDomain>(context, nics_, keeps_order_);
  if (auto good = domain->open(); !good) return good.error();
  OpenedNics opened;
  opened.nics.push_back(std::move(domain));
  return opened;
}

}  // namespace kvxfer::null
