#include "ofi/ofi_bench.hpp"

#include <algorithm>

#include "clock.hpp"
#include "support.hpp"

namespace kvxfer::test {

EngineOptions ofi_options(const std::string& name, unsigned endpoints) {
  EngineOptions options = options_for("ofi", name);
  options.nics = {"lo"};
  options.tuning.ofi_endpoints = endpoints;
  return options;
}

EngineOptions strict_ofi_options(const std::string& name, unsigned endpoints) {
  EngineOptions options = ofi_options(name, endpoints);
  options.ofi_strict = true;
  return options;
}

bool ofi_skipped() {
  const std::string why = why_not("ofi");
  if (!why.empty()) MESSAGE("skipped: " << why);
  return !why.empty();
}

std::size_t count_other_than(const RegionPtr& region, std::byte value) {
  return region->size() - static_cast<std::size_t>(
                              std::count(region->host(), region->host() + region->size(), value));
}

OfiBench::OfiBench(EngineOptions options, ofi::OfiFactory::Overrides overrides)
    : completions(good(CompletionQueue::create())),
      counters(*completions),
      options_(std::move(options)),
      poller_(good(Poller::create())) {
  NicEvents& events = *this;
  // NICs are made one by one, on all devices in turn, so that only its own polls drive each.
  for (const unsigned endpoints = std::exchange(options_.tuning.ofi_endpoints, 1);
       nics_.size() < endpoints;) {
    auto opened = good(ofi::OfiFactory(overrides).open(
        {.options = options_,
         .poller = poller_,
         .background = background_,
         .gpus = gpus_,
         .receive_context = {regions_, counters, stats, activity_, gpus_},
         .events = events,
         .first_number = reader() + 1}));
    nics_.push_back(std::move(opened.nics[nics_.size() % opened.nics.size()]));
  }
}

OfiBench::Joined OfiBench::join(std::uint32_t nic) {
  const auto end = [&](std::uint32_t ours, std::uint32_t theirs) {
    return good(BarePath::open(*nics_[ours],
                               {.id = ++last_path_,
                                .peer = nic,
                                .nic = ours,
                                .remote_nic = theirs,
                                .label = "'peer " + std::to_string(nic) + "'"},
                               [this](const auto& so) { until(so); }));
  };
  Joined ends{.writer = end(nic, reader()), .reader = end(reader(), nic)};
  const std::string endpoint = ends.writer->endpoint();
  good(ends.reader.connect(endpoint));
  good(ends.writer.connect(ends.reader->endpoint()));
  ends.writer->open();
  ends.reader->open();
  // Each end has heard the other; an end that is shut before takes no write, and loses none.
  until([&] { return ends.writer->proven() && ends.reader->proven(); });
  return ends;
}

RegionPtr OfiBench::region(std::size_t bytes) {
  RegionPtr made = good(MemoryRegion::allocate({}, bytes));
  std::vector<std::shared_ptr<NicRegistration>> registrations;
  for (const auto& each : nics_) registrations.push_back(good(each->register_memory(*made)));
  made->set_registrations(std::move(registrations));
  return made;
}

RemoteKey OfiBench::key_for(std::uint32_t writer, const RegionPtr& region) {
  return good(region->registration(reader())->share(writer));
}

OperationPtr OfiBench::post(NicPath& path, const RegionPtr& source, const RemoteKey& destination,
                            std::size_t pieces, std::uint32_t piece_bytes, std::optional<Imm> imm) {
  const OperationPtr made =
      operation_of(source, std::vector(nics_.size(), destination), pieces, piece_bytes, imm);
  until([&] {
    if (!made->wants_post() || lost.contains(&path)) return true;
    if (path.has_room(*made, imm.has_value())) made->took(path.post(made, made->next()));
    return false;
  });
  return made;
}

void OfiBench::until(const std::function<bool()>& so) {
  poll_until(so, 0, static_cast<std::uint32_t>(nics_.size()));
}

void OfiBench::until_polled(std::uint32_t nic, const std::function<bool()>& so) {
  poll_until(so, nic, nic + 1);
}

void OfiBench::poll_until(const std::function<bool()>& so, std::uint32_t first, std::uint32_t end) {
  const std::uint64_t deadline = now_ns() + static_cast<std::uint64_t>(kDeadline.count());
  while (!so()) {
    REQUIRE_MESSAGE(now_ns() < deadline, "the condition was not true before the deadline");
    poller_.poll(0);
    background_.finish();
    for (std::uint32_t nic = first; nic < end; ++nic) nics_[nic]->poll();
  }
}

void OfiBench::settle() {
  // Far longer than packets stay in this host's sockets, even on a busy machine.
  const std::uint64_t end = now_ns() + 200'000'000u;
  until([&] { return now_ns() > end; });
}

void OfiBench::on_finished(const OperationPtr& operation, const WriteRange& writes,
                           const Error& error) {
  operation->finish(writes, error.code == Errc::ok);
}

}  // namespace kvxfer::test
