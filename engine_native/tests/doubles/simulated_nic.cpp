#include "doubles/simulated_nic.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>

#include "bootstrap/bytes.hpp"
#include "memory_region.hpp"
#include "retire.hpp"

namespace kvxfer::test {
namespace {

constexpr std::uint64_t kImmWindow = 64;
constexpr std::size_t kBatch = 32;

}  // namespace

class SimulatedRegistration final : public NicRegistration {
 public:
  SimulatedRegistration(SimulatedNetwork& network, const MemoryRegion& region)
      : network_(network), address_(region.address()) {
    const std::lock_guard lock(network_.mutex_);
    key_ = network_.random_();
    network_.keys_[key_] = {address_, region.size(), 0};
  }
  ~SimulatedRegistration() override { (void)close(); }
  Result<RemoteKey> share(PeerId) override {
    return RemoteKey{.address = address_, .rkey = key_, .valid = true};
  }
  void unshare(PeerId) override {}
  Result<void> close() override {
    const std::lock_guard lock(network_.mutex_);
    network_.keys_.erase(key_);
    return {};
  }

 private:
  SimulatedNetwork& network_;
  std::uint64_t address_;
  std::uint64_t key_;
};

class SimulatedPath final : public NicPath {
 public:
  SimulatedPath(NicPathIdentity identity, std::string nic, bool ordered, SimulatedNetwork& network,
                NicLoad& load, const NicContext& context)
      : NicPath(std::move(identity), kImmWindow, load, context.receive_context, context.events),
        nic_(std::move(nic)),
        ordered_(ordered),
        network_(network),
        background_(context.background) {
    const std::lock_guard lock(network_.mutex_);
    end_ = ++network_.last_end_;
    network_.ends_[end_] = this;
  }
  std::string_view fabric() const override { return "simulated"; }
  std::string endpoint() const override { return ByteWriter().put(end_).take(); }
  void connect(std::string_view endpoint, Connected then) override {
    {
      const std::lock_guard lock(network_.mutex_);
      unsigned& refuses = network_.nics_.at(nic_).refuses;
      if (refuses > 0) {
        --refuses;
        return then(
            Error{Errc::nic_lost, "NIC " + nic_ + " has no way to peer " + identity_.label});
      }
    }
    peer_end_ = ByteReader(endpoint).get<std::uint64_t>();
    set_peer_imm_window(kImmWindow);
    then_connected_ = std::move(then);
    background_.run([] { take_a_while(); },
                    [this, alive = std::weak_ptr(alive_)] {
                      if (alive.expired() || !then_connected_) return;
                      std::exchange(then_connected_, nullptr)({});
                    });
  }
  const std::string& nic() const { return nic_; }

  std::size_t post(const OperationPtr& operation, const WriteRange& writes) override {
    const std::size_t count = batch_limit(operation, writes, kBatch);
    for (std::size_t first = 0; first < count;) {
      const std::size_t size =
          writes.counted && operation->imm
              ? operation->fill_group({writes.first + first, count - first, true}, 1)
              : 1;
      post_group(operation, {writes.first + first, size, writes.counted});
      first += size;
    }
    network_.arrived_.notify_all();
    return count;
  }

  // Completes the group with its last write.
  void post_group(const OperationPtr& operation, const WriteRange& group) {
    const auto begin = operation->writes.begin() + static_cast<std::ptrdiff_t>(group.first);
    const std::span writes(begin, group.count);
    std::uint64_t bytes = 0;
    for (const WireWrite& write : writes) bytes += write.length;
    const std::uint64_t sequence = add_batch(operation, group, bytes).sequence;
    const std::lock_guard lock(network_.mutex_);
    for (const WireWrite& write : writes) {
      SimulatedNetwork::Packet packet{.from = end_, .to = peer_end_, .ordered = ordered_};
      if (write.length > 0) {
        const RemoteKey& key = remote_key(*operation);
        packet.rkey = key.rkey;
        packet.address = key.address + write.destination;
        packet.source = operation->source->host() + write.source;
        packet.length = write.length;
      }
      if (&write == &writes.back()) {
        packet.sequence = sequence;
        if (group.counted) packet.imm = operation->imm;
      }
      network_.wire_.push_back(packet);
    }
  }

  // Returns through `then`; writes of the peer may land until that is called.
  void shut(std::function<void()> then) override {
    then_connected_ = nullptr;
    using Left = std::vector<SimulatedNetwork::Completion>;
    background_.run<Left>(
        [this] {
          take_a_while();
          Left left = network_.close(end_, *this);
          if (!ordered_) left.clear();
          return left;
        },
        [this, then = std::move(then)](const Left& left) {
          for (const auto& completion : left) take(completion);
          then();
        });
  }

  bool open_window(const MemoryRegion& grant) override {
    const std::uint64_t address = grant.address();
    if (windows_.contains(grant.key())) return true;
    const std::lock_guard lock(network_.mutex_);
    const std::uint64_t key = network_.random_();
    network_.keys_[key] = {address, grant.size(), end_};
    windows_[grant.key()] = {.address = address, .rkey = key};
    network_.complete(*this, {.path = this, .grant = grant.key()});
    return true;
  }
  void close_window(std::uint64_t grant) override {
    const std::lock_guard lock(network_.mutex_);
    const auto found = windows_.find(grant);
    if (found == windows_.end()) return;
    network_.keys_.erase(found->second.rkey);
    windows_.erase(found);
  }
  bool has_windows_of(const MemoryRegion& region) const override {
    const std::uint64_t begin = region.address();
    return std::any_of(windows_.begin(), windows_.end(), [&](const auto& entry) {
      return entry.second.address >= begin && entry.second.address < begin + region.size();
    });
  }
  std::optional<RemoteKey> window(std::uint64_t grant) const override {
    const auto found = windows_.find(grant);
    return found == windows_.end() || !found->second.valid ? std::nullopt
                                                           : std::optional(found->second);
  }

  void take(const SimulatedNetwork::Completion& completion) {
    if (completion.grant) {
      const auto opened = windows_.find(*completion.grant);
      if (opened == windows_.end() || lost()) return;
      opened->second.valid = true;
      events_.on_window(*this, *completion.grant);
    } else if (completion.refused) {
      lose({Errc::nic_lost, "the simulated NIC refused a write"});
    } else if (completion.imm) {
      count_immediates(*completion.imm, 1);
    } else if (ordered_) {
      finish_through(completion.sequence);
    } else {
      finish(completion.sequence);
    }
  }
  void link_down() { lose({Errc::nic_lost, "the link of NIC " + nic_ + " is down"}); }

 private:
  // Takes a while, as drivers do.
  static void take_a_while() {
    thread_local std::minstd_rand random(std::random_device{}());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  }

  std::string nic_;
  bool ordered_;
  SimulatedNetwork& network_;
  Background& background_;
  Connected then_connected_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  std::uint64_t end_ = 0;
  std::uint64_t peer_end_ = 0;
  std::map<std::uint64_t, RemoteKey> windows_;  // by grant; valid once they are open
};

class SimulatedDomain final : public NicDomain, private EventSink {
 public:
  SimulatedDomain(SimulatedNetwork& network, const std::string& name, std::uint64_t gbits,
                  const SimulatedTraits& traits, const NicContext& context)
      : network_(network),
        context_(context),
        windows_(traits.windows),
        ordered_(traits.ordered),
        info_{.name = name,
              .network = ordered_ ? "ordered" : "simulated",
              .bits_per_second = gbits * 1'000'000'000u},
        load_{.bits_per_second = info_.bits_per_second},
        event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    (void)context_.poller.add(event_.get(), EPOLLIN, *this);
    const std::lock_guard lock(network_.mutex_);
    network_.nics_[name].domain = this;
  }
  ~SimulatedDomain() override {
    context_.poller.remove(event_.get(), *this);
    const std::lock_guard lock(network_.mutex_);
    network_.nics_.at(info_.name).domain = nullptr;
  }

  std::string_view fabric() const override { return "simulated"; }
  const NicInfo& info() const override { return info_; }
  bool usable() const override { return up_; }
  bool keeps_order() const override { return ordered_; }
  bool keeps_arrivals() const override { return ordered_; }
  std::uint64_t max_window() const override { return windows_ ? UINT64_MAX : 0; }
  Result<std::shared_ptr<NicRegistration>> register_memory(const MemoryRegion& region) override {
    return std::shared_ptr<NicRegistration>(
        std::make_shared<SimulatedRegistration>(network_, region));
  }
  void open_path(NicPathIdentity identity, Opened then) override {
    context_.background.run([] {},
                            [this, identity = std::move(identity), then = std::move(then)] {
                              then(std::unique_ptr<NicPath>(std::make_unique<SimulatedPath>(
                                  identity, info_.name, ordered_, network_, load_, context_)));
                            });
  }
  void poll() override {
    std::vector<SimulatedNetwork::Completion> completions;
    std::vector<SimulatedPath*> down;
    bool changed = false;
    {
      const std::lock_guard lock(network_.mutex_);
      auto& nic = network_.nics_.at(info_.name);
      completions.swap(nic.completions);
      if (!ordered_) std::shuffle(completions.begin(), completions.end(), network_.random_);
      changed = nic.up != up_;
      up_ = nic.up;
      const bool went_down = std::exchange(downs_, nic.downs) != nic.downs;
      for (const auto& [end, path] : network_.ends_) {
        if ((!up_ || went_down) && path->nic() == info_.name) down.push_back(path);
      }
    }
    for (const auto& completion : completions) completion.path->take(completion);
    for (SimulatedPath* path : down) path->link_down();
    if (changed) context_.events.on_nic_state(*this);
  }
  bool prepare_sleep() override {
    const std::lock_guard lock(network_.mutex_);
    const auto& nic = network_.nics_.at(info_.name);
    return nic.completions.empty() && nic.up == up_ && nic.downs == downs_;
  }
  void finish_sleep() override {}
  void wake() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(event_.get(), &one, sizeof one);
  }

 private:
  void on_events(std::uint32_t) override {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = ::read(event_.get(), &count, sizeof count);
  }

  SimulatedNetwork& network_;
  NicContext context_;
  bool windows_;
  bool ordered_;
  NicInfo info_;
  NicLoad load_;
  UniqueFd event_;
  bool up_ = true;
  std::uint64_t downs_ = 0;  // the number last seen
};

namespace {

class SimulatedFactory final : public NicFactory {
 public:
  SimulatedFactory(SimulatedNetwork& network,
                   std::vector<std::pair<std::string, std::uint64_t>> nics, SimulatedTraits traits)
      : network_(network), nics_(std::move(nics)), traits_(std::move(traits)) {}
  Result<OpenedNics> open(const NicContext& context) override {
    OpenedNics opened{.names = traits_.foreign};
    for (const auto& [name, gbits] : nics_) {
      opened.names.push_back(name);
      opened.nics.push_back(
          std::make_unique<SimulatedDomain>(network_, name, gbits, traits_, context));
    }
    for (const std::string& name : traits_.broken) {
      opened.names.push_back(name);
      opened.notices.push_back("NIC " + name + " cannot be opened");
    }
    return opened;
  }

 private:
  SimulatedNetwork& network_;
  std::vector<std::pair<std::string, std::uint64_t>> nics_;
  SimulatedTraits traits_;
};

}  // namespace

SimulatedNetwork::SimulatedNetwork(std::uint64_t seed)
    : random_(seed), thread_([this](const std::stop_token& stop) { run(stop); }) {}

SimulatedNetwork::~SimulatedNetwork() {
  await_retired();  // memory is deregistered here
}

std::shared_ptr<NicFactory> SimulatedNetwork::nics(
    std::vector<std::pair<std::string, std::uint64_t>> nics, SimulatedTraits traits) {
  return std::make_shared<SimulatedFactory>(*this, std::move(nics), std::move(traits));
}

void SimulatedNetwork::set_link(const std::string& nic, bool up) {
  const std::lock_guard lock(mutex_);
  Nic& changed = nics_[nic];
  if (!up && changed.up) ++changed.downs;
  changed.up = up;
  // Packets on the wire are lost.
  if (!up) {
    const auto crosses = [&](std::uint64_t end) {
      const auto found = ends_.find(end);
      return found != ends_.end() && found->second->nic() == nic;
    };
    std::erase_if(wire_, [&](const Packet& packet) {
      const bool lost = crosses(packet.from) || crosses(packet.to);
      if (lost && packet.ordered) broken_.insert(packet.from);
      return lost;
    });
  }
  if (changed.domain) changed.domain->wake();
}

void SimulatedNetwork::lose_arrivals(const std::string& nic, bool lose) {
  const std::lock_guard lock(mutex_);
  nics_[nic].loses_arrivals = lose;
}

void SimulatedNetwork::withhold_arrivals(const std::string& nic, bool withheld) {
  const std::lock_guard lock(mutex_);
  Nic& changed = nics_[nic];
  changed.withholds_arrivals = withheld;
  if (withheld) return;
  for (const Completion& completion : std::exchange(changed.withheld, {})) {
    complete(*completion.path, completion);
  }
}

std::size_t SimulatedNetwork::ends_closed() {
  const std::lock_guard lock(mutex_);
  return ends_closed_;
}

void SimulatedNetwork::lose_completions(const std::string& nic, bool lose) {
  const std::lock_guard lock(mutex_);
  nics_[nic].loses_completions = lose;
}

void SimulatedNetwork::refuse_writes(const std::string& nic, unsigned times) {
  const std::lock_guard lock(mutex_);
  nics_[nic].refuses_writes = times;
}

void SimulatedNetwork::refuse_joins(const std::string& nic, unsigned times) {
  const std::lock_guard lock(mutex_);
  nics_[nic].refuses = times;
}

unsigned SimulatedNetwork::refusals_left(const std::string& nic) {
  const std::lock_guard lock(mutex_);
  return nics_[nic].refuses;
}

void SimulatedNetwork::hold(bool held) {
  const std::lock_guard lock(mutex_);
  held_ = held;
  arrived_.notify_all();
}

void SimulatedNetwork::await_posted(std::size_t count) {
  std::unique_lock lock(mutex_);
  if (!arrived_.wait_for(lock, std::chrono::seconds(20), [&] { return wire_.size() >= count; })) {
    throw std::runtime_error("nothing more was posted");
  }
}

void SimulatedNetwork::deliver_newest() {
  const std::lock_guard lock(mutex_);
  deliver(take(wire_.size() - 1));
}

SimulatedNetwork::Packet SimulatedNetwork::take(std::size_t index) {
  if (!wire_[index].ordered) {
    std::swap(wire_[index], wire_.back());
    const Packet packet = wire_.back();
    wire_.pop_back();
    return packet;
  }
  const auto first = std::find_if(wire_.begin(), wire_.end(), [&](const Packet& packet) {
    return packet.from == wire_[index].from;
  });
  const Packet packet = *first;
  wire_.erase(first);
  return packet;
}

std::uint64_t SimulatedNetwork::delivered(const std::string& nic) {
  const std::lock_guard lock(mutex_);
  return nics_[nic].delivered;
}

void SimulatedNetwork::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (arrived_.wait(lock, stop, [this] { return !wire_.empty() && !held_; })) {
    if (stop.stop_requested()) return;
    // Any waiting packet is next, and sometimes more gather first; not often, as a thread that
    // yields on a busy machine waits for milliseconds.
    if (random_() % 256 == 0) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
    if (wire_.empty() || held_) continue;
    deliver(take(random_() % wire_.size()));
  }
}

void SimulatedNetwork::deliver(const Packet& packet) {
  const auto from = ends_.find(packet.from);
  if (from == ends_.end()) return;
  SimulatedPath& sender = *from->second;
  const auto to = ends_.find(packet.to);
  const bool linked =
      to != ends_.end() && nics_.at(sender.nic()).up && nics_.at(to->second->nic()).up;
  const auto key = keys_.find(packet.rkey);
  const bool granted = packet.length == 0 ||
                       (key != keys_.end() && packet.address >= key->second.address &&
                        (key->second.end == 0 || key->second.end == packet.to) &&
                        packet.address + packet.length <= key->second.address + key->second.length);
  unsigned& refuses = nics_.at(sender.nic()).refuses_writes;
  const bool refused = refuses > 0;
  if (refused) --refuses;
  if (!linked || !granted || refused || broken_.contains(packet.from)) {
    if (packet.ordered) broken_.insert(packet.from);
    return complete(sender, {.path = &sender, .refused = true});
  }
  if (packet.length > 0) {
    std::memcpy(reinterpret_cast<void*>(packet.address), packet.source, packet.length);
  }
  ++nics_.at(sender.nic()).delivered;
  if (packet.imm && !nics_.at(to->second->nic()).loses_arrivals) {
    complete(*to->second, {.path = to->second, .imm = packet.imm});
  }
  if (packet.sequence != 0 && !nics_.at(sender.nic()).loses_completions) {
    complete(sender, {.path = &sender, .sequence = packet.sequence});
  }
}

std::vector<SimulatedNetwork::Completion> SimulatedNetwork::close(std::uint64_t end,
                                                                  const SimulatedPath& path) {
  const std::lock_guard lock(mutex_);
  ends_.erase(end);
  broken_.erase(end);
  std::erase_if(wire_, [&](const Packet& packet) { return packet.from == end; });
  std::erase_if(keys_, [&](const auto& entry) { return entry.second.end == end; });
  ++ends_closed_;
  std::vector<Completion> left;
  Nic& nic = nics_.at(path.nic());
  for (auto* const queue : {&nic.completions, &nic.withheld}) {
    const auto others = std::stable_partition(queue->begin(), queue->end(),
                                              [&](const auto& each) { return each.path != &path; });
    left.insert(left.end(), others, queue->end());
    queue->erase(others, queue->end());
  }
  return left;
}

void SimulatedNetwork::complete(SimulatedPath& path, Completion completion) {
  Nic& nic = nics_.at(path.nic());
  if (completion.imm && nic.withholds_arrivals) return nic.withheld.push_back(completion);
  nic.completions.push_back(completion);
  if (nic.domain) nic.domain->wake();
}

SimulatedNetwork& simulated_network() {
  static SimulatedNetwork network(std::random_device{}());
  return network;
}

}  // namespace kvxfer::test
