#include "verbs/verbs_bench.hpp"

#include "clock.hpp"
#include "fabric/verbs/verbs_factory.hpp"
#include "support.hpp"

namespace kvxfer::test {

bool skipped_without_verbs() {
  const std::string why = why_not("verbs");
  if (!why.empty()) MESSAGE("skipped: " << why);
  return !why.empty();
}

std::vector<std::string> verbs_fabrics() {
  std::vector<std::string> fabrics{"mlx5", "verbs"};
  std::erase_if(fabrics, [](const std::string& fabric) { return !why_not(fabric).empty(); });
  return fabrics;
}

VerbsBench::VerbsBench(const std::string& fabric)
    : completions(good(CompletionQueue::create())),
      counters(*completions),
      poller(good(Poller::create())),
      options_(options_for(fabric, "bench")) {
  NicEvents& events = *this;
  verbs::VerbsFactory real;
  NicFactory& factory = options_.more_nics ? *options_.more_nics : real;
  nics_ = good(factory.open({.options = options_,
                             .poller = poller,
                             .background = background_,
                             .gpus = gpus_,
                             .receive_context = {regions_, counters, stats, activity_, gpus_},
                             .events = events,
                             .first_number = 0}))
              .nics;
}

VerbsBench::~VerbsBench() {
  until([&] { return background_.idle(); });
}

Result<BarePath> VerbsBench::open(std::size_t number) {
  return BarePath::open(nic(number),
                        {.id = ++last_path_,
                         .peer = 1,
                         .nic = static_cast<std::uint32_t>(number % nics_.size()),
                         .remote_nic = static_cast<std::uint32_t>(nics_.size() - 1),
                         .label = "'bench'"},
                        [this](const auto& so) { until(so); });
}

VerbsBench::Joined VerbsBench::join() {
  Joined ends;
  // Addresses may have to be resolved first; a link tries again, too.
  until([&] {
    ends = {.writer = good(open(0)), .reader = good(open(nics_.size() - 1))};
    return ends.reader.connect(ends.writer->endpoint()) &&
           ends.writer.connect(ends.reader->endpoint());
  });
  ends.writer->open();
  ends.reader->open();
  return ends;
}

RegionPtr VerbsBench::region(std::size_t bytes) {
  RegionPtr made = good(MemoryRegion::allocate({}, bytes));
  std::vector<std::shared_ptr<NicRegistration>> registrations;
  for (const auto& each : nics_) registrations.push_back(good(each->register_memory(*made)));
  made->set_registrations(std::move(registrations));
  return made;
}

RemoteKey VerbsBench::key(const RegionPtr& region) {
  return good(region->registration(static_cast<std::uint32_t>(nics_.size() - 1))->share(1));
}

OperationPtr VerbsBench::operation(const RegionPtr& source, const RemoteKey& destination,
                                   std::size_t pieces, std::uint32_t piece_bytes,
                                   std::optional<Imm> imm) {
  return operation_of(source, std::vector(nics_.size(), destination), pieces, piece_bytes, imm);
}

void VerbsBench::post(NicPath& path, const OperationPtr& operation) {
  while (operation->wants_post() && path.has_room(*operation, operation->imm.has_value())) {
    const std::size_t posted = path.post(operation, operation->next());
    if (posted == 0) return;
    operation->took(posted);
  }
}

void VerbsBench::poll() {
  poller.poll(0);
  background_.finish();
  for (const auto& each : nics_) each->poll();
}

void VerbsBench::until(const std::function<bool()>& so) {
  const std::uint64_t deadline = now_ns() + static_cast<std::uint64_t>(kDeadline.count());
  while (!so()) {
    REQUIRE_MESSAGE(now_ns() < deadline, "the condition was not true before the deadline");
    poll();
  }
}

void VerbsBench::on_finished(const OperationPtr& operation, const WriteRange& writes,
                             const Error& error) {
  operation->finish(writes, error.code == Errc::ok);
}

}  // namespace kvxfer::test
