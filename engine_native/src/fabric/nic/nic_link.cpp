#include "fabric/nic/nic_link.hpp"

#include <algorithm>

#include "refusal.hpp"

namespace kvxfer {
namespace {

constexpr std::uint64_t kRetryNs = 250'000'000u;
// The wait before opening paths of a pair that carried nothing doubles at most this often.
constexpr unsigned kMostDoublings = 5;
// An operation fails when its paths were lost this often in a row, with none of its writes
// delivered in between. Paths that are lost together, as by the loss of a NIC or a switch, count
// once: within kTogetherNs, or later if they existed at the first loss.
constexpr unsigned kMaxLosses = 5;
constexpr std::uint64_t kTogetherNs = 250'000'000u;
constexpr std::size_t kMaxEntries = 8 * kMaxNics;

Error malformed(std::string_view what) {
  return {Errc::protocol_error, "the peer sent a malformed frame: " + std::string(what)};
}

// Shuts a path that its link no longer wants; it was never connected.
void discard(std::unique_ptr<NicPath> path) {
  NicPath& unwanted = *path;
  unwanted.shut([kept = std::shared_ptr<NicPath>(std::move(path))] {});
}

NicMask all_of(std::size_t count) { return count >= 64 ? ~NicMask{0} : (NicMask{1} << count) - 1; }

}  // namespace

NicLink::NicLink(Ends ends, const std::vector<std::unique_ptr<NicDomain>>& ours,
                 NicLinkOwner& owner, OperationBook& operations)
    : ends_(std::move(ends)),
      ours_(ours),
      owner_(owner),
      operations_(operations),
      their_usable_(all_of(ends_.theirs.size())),
      regions_(ends_.peer, ends_.label, owner, operations),
      lost_writes_(ends_.peer, operations),
      grants_(owner) {}

NicMask NicLink::our_usable() const {
  NicMask mask = 0;
  for (std::size_t n = 0; n < ours_.size(); ++n) {
    if (ours_[n]->usable()) mask |= NicMask{1} << n;
  }
  return mask;
}

std::vector<NicInfo> NicLink::our_infos() const {
  std::vector<NicInfo> infos;
  infos.reserve(ours_.size());
  for (const auto& nic : ours_) infos.push_back(nic->info());
  return infos;
}

// --- opening paths ---------------------------------------------------------------------------

void NicLink::open_missing(std::uint64_t now) {
  if (!ends_.initiator || shutting_ || now < retry_at_ns_) return;
  now_ = now;
  missing_ = false;
  for (const NicPair pair : pair_nics(our_infos(), our_usable(), ends_.theirs, their_usable_)) {
    const auto fruitless = fruitless_.find(pair);
    const bool rests = fruitless != fruitless_.end() && now < fruitless->second.until_ns;
    if (rests && (!usable_.empty() || owner_.has_other_ways())) continue;
    auto there = std::count_if(entries_.begin(), entries_.end(),
                               [&](const auto& entry) { return entry.second.nics == pair; });
    for (; there < ends_.paths_per_nic_pair; ++there) open_path(pair);
  }
}

void NicLink::open_path(NicPair pair) {
  last_open_ns_ = now_;
  make(++last_path_, pair, {});
}

void NicLink::make(PathId id, NicPair nics, std::string endpoint) {
  entries_[id] = {
      .nics = nics, .known = !ends_.initiator, .endpoint = std::move(endpoint), .since_ns = now_};
  ours_[nics.ours]->open_path(
      {.id = id,
       .peer = ends_.peer,
       .nic = nics.ours,
       .remote_nic = nics.theirs,
       .label = ends_.label},
      [this, alive = std::weak_ptr(alive_), id](Result<std::unique_ptr<NicPath>> path) {
        if (!alive.expired()) return on_made(id, std::move(path));
        if (path) discard(std::move(*path));
      });
}

void NicLink::on_made(PathId id, Result<std::unique_ptr<NicPath>> path) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) {
    if (path) discard(std::move(*path));
    return;
  }
  if (!path) {
    entries_.erase(found);
    retry(path.error().text);
    ends_.initiator ? offer_made() : answer(id, path.error().code, trouble_);
    return refresh_usable();
  }
  Entry& entry = found->second;
  entry.path = std::move(*path);
  ends_.initiator ? offer_made() : connect(id);
}

// Offers paths in the order of their numbers, which the peer expects to grow.
void NicLink::offer_made() {
  for (auto& [id, entry] : entries_) {
    if (entry.state != Entry::State::making) continue;
    if (!entry.path) return;
    entry.state = Entry::State::opening;
    entry.since_ns = now_;
    entry.known = true;
    owner_.send_nic_frame(NicFrame::path_open, ByteWriter()
                                                   .put(id)
                                                   .put(entry.nics.ours)
                                                   .put(entry.nics.theirs)
                                                   .text(entry.path->endpoint())
                                                   .take());
  }
}

Result<void> NicLink::on_path_open(ByteReader reader) {
  const auto id = reader.get<PathId>();
  const auto theirs = reader.get<std::uint32_t>();
  const auto ours = reader.get<std::uint32_t>();
  std::string endpoint = reader.text();
  if (!reader.finished() || ends_.initiator || id <= last_path_ || ours >= ours_.size() ||
      theirs >= ends_.theirs.size() || entries_.size() >= kMaxEntries) {
    return malformed("path_open");
  }
  last_path_ = id;
  const NicDomain& domain = *ours_[ours];
  const std::string nic = "NIC " + domain.info().name + " there";
  if (!domain.usable()) {
    answer(id, Errc::nic_lost, nic + " is down");
  } else if (domain.info().network != ends_.theirs[theirs].network) {
    answer(id, Errc::nic_lost, nic + " is in another network, " + domain.info().network);
  } else {
    make(id, {.ours = ours, .theirs = theirs}, std::move(endpoint));
  }
  return {};
}

void NicLink::answer(PathId id, Errc status, std::string_view text) {
  owner_.send_nic_frame(
      NicFrame::path_opened,
      ByteWriter().put(id).put(static_cast<std::uint16_t>(status)).text(text).take());
}

Result<void> NicLink::on_path_opened(ByteReader reader) {
  const auto id = reader.get<PathId>();
  const auto status = static_cast<Errc>(reader.get<std::uint16_t>());
  std::string text = reader.text();
  if (!reader.finished() || !ends_.initiator) return malformed("path_opened");
  const auto found = entries_.find(id);
  if (found == entries_.end()) return {};
  Entry& entry = found->second;
  const bool closing = entry.state == Entry::State::closing;
  // No path_open was sent, or it was answered before.
  if (!entry.known || (entry.state != Entry::State::opening && !closing)) {
    return malformed("path_opened");
  }
  if (status != Errc::ok) {
    // The peer has no end of this path, so it will not report that it is closed.
    entry.there = Closed{};
    entry.known = false;
    if (closing) {
      finish_closing(id);
      return {};
    }
    retry(text);
    close(entry, text, true);
  } else if (!closing) {
    entry.endpoint = std::move(text);
    connect(id);
  }
  return {};
}

void NicLink::connect(PathId id) {
  Entry& entry = entries_.at(id);
  entry.state = Entry::State::connecting;
  const std::string endpoint = std::exchange(entry.endpoint, {});
  entry.path->connect(endpoint, [this, id](const Result<void>& good) { on_connected(id, good); });
}

void NicLink::on_connected(PathId id, const Result<void>& good) {
  Entry& entry = entries_.at(id);
  if (!good) {
    retry(good.error().text);
    if (!ends_.initiator) {
      answer(id, good.error().code, trouble_);
      entry.known = false;
    }
    return close(entry, trouble_, true);
  }
  if (ends_.initiator) {
    owner_.send_nic_frame(NicFrame::path_ready, ByteWriter().put(id).take());
    return enter_service(entry);
  }
  entry.state = Entry::State::opening;
  entry.since_ns = now_;
  answer(id, Errc::ok, entry.path->endpoint());
}

void NicLink::enter_service(Entry& entry) {
  if (!entry.path->proven()) {
    entry.state = Entry::State::greeting;
    entry.since_ns = now_;
    greeting_ = true;
    return;
  }
  entry.state = Entry::State::open;
  entry.progress_ns = now_;
  entry.path->open();
  grants_.open_on(*entry.path);
  refresh_usable();
}

void NicLink::admit_proven() {
  greeting_ = false;
  for (auto& [id, entry] : entries_) {
    if (entry.state != Entry::State::greeting) continue;
    entry.path->proven() ? enter_service(entry) : void(greeting_ = true);
  }
}

std::string NicLink::silence_of(const Entry& entry, std::uint64_t now) const {
  const std::string_view cause = entry.path->likely_cause();
  return "NICs " + ours_[entry.nics.ours]->info().name + " and " +
         ends_.theirs[entry.nics.theirs].name + " have not heard each other for " +
         std::to_string((now - entry.since_ns) / 1'000'000) + " ms" +
         (cause.empty() ? "" : ": " + std::string(cause));
}

// Reports silence once, until something has come through between the two NICs.
void NicLink::tell_of_silence(const Entry& entry, std::string_view why) {
  if (fruitless_.contains(entry.nics)) return;
  owner_.on_notice("NIC " + ours_[entry.nics.ours]->info().name + " is not used with peer " +
                   ends_.label + ": " + std::string(why));
}

// Replaces a path that lived for a while at once, others after a pause.
void NicLink::retry(std::string_view trouble) {
  trouble_ = trouble;
  missing_ = true;
  retry_at_ns_ = last_open_ns_ + kRetryNs;
}

bool NicLink::settled() const {
  return std::none_of(entries_.begin(), entries_.end(), [](const auto& entry) {
    const auto state = entry.second.state;
    return state != Entry::State::open && state != Entry::State::closing;
  });
}

void NicLink::refresh_usable() {
  usable_.clear();
  for (const auto& [id, entry] : entries_) {
    if (entry.state == Entry::State::open) usable_.push_back(entry.path.get());
  }
  regions_.set_paths(usable_.size());
  owner_.on_paths_changed();
}

// Called when a NIC has gone down or come back.
void NicLink::retry_now() {
  retry_at_ns_ = 0;
  fruitless_.clear();
  missing_ = true;
}

void NicLink::announce_nics() {
  owner_.send_nic_frame(NicFrame::nic_state, ByteWriter().put(our_usable()).take());
  retry_now();
}

// --- losing paths ----------------------------------------------------------------------------

bool NicLink::owns(const Path& path) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const auto& entry) { return entry.second.path.get() == &path; });
}

void NicLink::on_path_lost(const Path& path, Error error) {
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const auto& entry) {
    return entry.second.path.get() == &path;
  });
  if (found != entries_.end()) lost_.emplace_back(found->first, std::move(error));
}

void NicLink::catch_up() {
  answer_revokes();
  if (missing_) open_missing(now_);
  if (greeting_) admit_proven();
  while (!lost_.empty()) {
    const auto lost = std::exchange(lost_, {});
    for (const auto& [id, error] : lost) {
      const auto found = entries_.find(id);
      if (found == entries_.end() || found->second.state == Entry::State::closing) continue;
      retry(error.text);
      close(found->second, error.text, true);
    }
  }
  if (stopping_ > 0) end_stops();
}

void NicLink::reset(std::string_view why) {
  std::vector<PathId> written;
  for (const auto& [id, entry] : entries_) {
    // The peer cannot write through others yet.
    const bool answered = entry.state == Entry::State::opening && !ends_.initiator;
    const bool joined = entry.state == Entry::State::open || entry.state == Entry::State::greeting;
    if (joined || answered) written.push_back(id);
  }
  for (const PathId id : written) {
    retry(why);
    close(entries_.at(id), why, false);
  }
}

bool NicLink::fencing() const {
  return std::any_of(entries_.begin(), entries_.end(), [](const auto& entry) {
    return entry.second.state == Entry::State::closing && !entry.second.shut;
  });
}

void NicLink::close(Entry& entry, std::string_view why, bool failed) {
  // Other paths have carried nothing.
  const bool answered = entry.state == Entry::State::opening && !ends_.initiator;
  const bool joined = entry.state == Entry::State::open || entry.state == Entry::State::greeting;
  entry.state = Entry::State::closing;
  entry.why = why;
  entry.failed = failed;
  refresh_usable();
  const bool keeps = ours_[entry.nics.ours]->keeps_arrivals();
  const bool used = joined || answered;
  used && !keeps && ends_.stops && !entry.there ? stop(entry) : begin_shut(entry);
}

// Sends path_stop, and waits for the peer's: writes that the peer knows to be delivered may not be
// counted here yet.
void NicLink::stop(Entry& entry) {
  NicPath& path = *entry.path;
  path.seal();
  entry.stopping = true;
  entry.since_ns = now_;
  ++stopping_;
  owner_.send_nic_frame(NicFrame::path_stop, ByteWriter()
                                                 .put(path.identity().id)
                                                 .text(std::string_view(entry.why).substr(0, 512))
                                                 .put(static_cast<std::uint8_t>(entry.failed))
                                                 .put(path.imms_delivered())
                                                 .take());
}

void NicLink::end_stops() {
  std::vector<PathId> counted;
  for (const auto& [id, entry] : entries_) {
    if (!entry.stopping) continue;
    // A peer that closed its end without a path_stop had written nothing.
    const bool all =
        entry.delivered ? entry.path->consumed() >= *entry.delivered : entry.there.has_value();
    if (all) counted.push_back(id);
  }
  for (const PathId id : counted) end_stop(id);
}

void NicLink::end_stop(PathId id) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  found->second.stopping = false;
  --stopping_;
  begin_shut(found->second);
}

void NicLink::begin_shut(Entry& entry) {
  NicPath& path = *entry.path;
  path.shut([this, id = path.identity().id] { on_shut(id); });
}

void NicLink::on_shut(PathId id) {
  Entry& entry = entries_.at(id);
  if (shutting_) {
    entries_.erase(id);
    return end_if_shut();
  }
  entry.shut = true;
  entry.since_ns = now_;
  if (entry.known) {
    say_closed(id, entry.why, {.received = entry.path->received(), .failed = entry.failed});
  } else {
    entry.there = Closed{};
  }
  finish_closing(id);
}

void NicLink::say_closed(PathId id, std::string_view why, const Closed& here) {
  ByteWriter writer;
  writer.put(id).text(why.substr(0, 512)).put(static_cast<std::uint8_t>(here.failed));
  writer.put(static_cast<std::uint32_t>(here.received.size()));
  for (const auto& [imm, count] : here.received) writer.put(imm).put(count);
  owner_.send_nic_frame(NicFrame::path_close, writer.take());
}

void NicLink::finish_closing(PathId id) {
  Entry& entry = entries_.at(id);
  if (!entry.shut || !entry.there) return;
  const std::unique_ptr<NicPath> path = std::move(entry.path);
  if (entry.failed || entry.there->failed) note_use(entry.nics, *path);
  const Closed there = std::move(*entry.there);
  entries_.erase(id);
  missing_ = true;
  refresh_usable();
  settle(*path, there);
}

void NicLink::note_use(NicPair nics, const NicPath& closed) {
  if (closed.finished_batches() > 0 || closed.consumed() > 0) {
    fruitless_.erase(nics);
    return;
  }
  Fruitless& fruitless = fruitless_[nics];
  fruitless.until_ns = now_ + (kRetryNs << std::min(fruitless.times++, kMostDoublings));
}

// Closes our end of a path that the peer closes.
void NicLink::follow(Entry& entry, const std::string& why, bool failed) {
  if (entry.state == Entry::State::greeting && failed) tell_of_silence(entry, why);
  retry(why);
  close(entry, why, failed);
}

Result<void> NicLink::on_path_stop(ByteReader reader) {
  const auto id = reader.get<PathId>();
  const std::string why = reader.text();
  const bool failed = reader.get<std::uint8_t>() != 0;
  const auto delivered = reader.get<std::uint64_t>();
  if (!reader.finished()) return malformed("path_stop");
  const auto found = entries_.find(id);
  if (found == entries_.end()) return {};
  Entry& entry = found->second;
  const bool closing = entry.state == Entry::State::closing;
  if (closing && !entry.known) return {};  // we have refused it
  if (!entry.known || !entry.path || entry.delivered || entry.there) return malformed("path_stop");
  entry.delivered = delivered;
  if (!closing) follow(entry, why, failed);
  return {};
}

Result<void> NicLink::on_path_close(ByteReader reader) {
  const auto id = reader.get<PathId>();
  const std::string why = reader.text();
  Closed there{.failed = reader.get<std::uint8_t>() != 0};
  const auto count = reader.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < count && reader.good(); ++i) {
    const auto imm = reader.get<Imm>();
    there.received[imm] = reader.get<std::uint64_t>();
  }
  if (!reader.finished()) return malformed("path_close");
  const auto found = entries_.find(id);
  if (found == entries_.end()) return {};
  Entry& entry = found->second;
  const bool closing = entry.state == Entry::State::closing;
  if (closing && !entry.known) return {};  // we have refused it
  if (!entry.known || entry.there) return malformed("path_close");
  const bool failed = there.failed;
  if (!entry.path) {
    // The path has carried nothing. It is dropped once it is made.
    retry(why);
    say_closed(id, why, {.failed = failed});
    entries_.erase(found);
    return {};
  }
  entry.there = std::move(there);
  if (closing) {
    finish_closing(id);
  } else {
    follow(entry, why, failed);
  }
  return {};
}

// Settles the writes of a path whose ends are both closed.
void NicLink::settle(NicPath& path, const Closed& there) {
  const bool in_order = ours_[path.identity().nic]->keeps_order();
  const auto touched = lost_writes_.give_back(path, in_order, there.received);
  if (!touched) return owner_.lose_peer(touched.error());
  regions_.forget_path(path.identity().id);
  for (const OperationPtr& operation : *touched) {
    operation->destination.reset();
    if (there.failed && path.identity().id > operation->newest_at_loss &&
        now_ - operation->lost_at_ns >= kTogetherNs) {
      const std::size_t before = std::exchange(operation->finished_at_loss, operation->finished);
      operation->losses = operation->finished == before ? operation->losses + 1 : 1;
      operation->lost_at_ns = now_;
      operation->newest_at_loss = last_path_;
    }
    if (operation->losses >= kMaxLosses && operation->wants_post()) {
      operations_.fail(operation, Errc::nic_lost,
                       "its paths were lost " + std::to_string(kMaxLosses) +
                           " times in a row; the last one: " + trouble_);
      continue;
    }
    operations_.settle(operation);
    if (operation->wants_post()) resolve(operation);
  }
  answer_revokes();
}

// True if writes are under way and none was finished for too long.
bool NicLink::is_stuck(Entry& entry, std::uint64_t now, std::uint64_t stalled_ns) const {
  const std::uint64_t finished = entry.path->finished_batches();
  if (entry.path->batches() == 0 || finished != entry.finished) {
    entry.finished = finished;
    entry.progress_ns = now;
  } else {
    entry.progress_ns += stalled_ns;
  }
  return now - std::min(now, entry.progress_ns) > ends_.path_timeout_ns;
}

void NicLink::tick(std::uint64_t now, std::uint64_t stalled_ns) {
  thread_.check("NicLink");
  now_ = now;
  std::vector<PathId> late;
  for (auto& [id, entry] : entries_) {
    entry.since_ns += stalled_ns;
    const bool waited = now - std::min(now, entry.since_ns) > ends_.path_timeout_ns;
    if (entry.stopping) {
      if (waited) late.push_back(id);
      continue;
    }
    if (entry.state == Entry::State::greeting && waited) {
      const std::string why = silence_of(entry, now);
      tell_of_silence(entry, why);
      lost_.emplace_back(id, Error{Errc::nic_lost, why});
    }
    if (entry.state == Entry::State::open && is_stuck(entry, now, stalled_ns)) {
      lost_.emplace_back(
          id, Error{Errc::nic_lost,
                    "no write was delivered for " +
                        std::to_string((now - entry.progress_ns) / 1'000'000) +
                        " ms: the network between the NICs is broken or congested; raise "
                        "tuning.path_timeout where it is slow to recover"});
    }
    const bool sealed = entry.path && entry.path->sealed();  // the peer may wait this long, too
    const std::uint64_t patience = ends_.timeout_ns + (sealed ? ends_.path_timeout_ns : 0);
    if (now - std::min(now, entry.since_ns) < patience) continue;
    if (entry.state == Entry::State::closing && entry.shut) {
      return owner_.lose_peer({Errc::peer_timeout, "it did not close a lost path in time"});
    }
    if (entry.state == Entry::State::opening) {
      lost_.emplace_back(id, Error{Errc::nic_lost, "a path was not opened in time"});
    }
  }
  for (const PathId id : late) end_stop(id);
  std::vector<const NicPath*> paths;
  for (const auto& [id, entry] : entries_) {
    if (entry.path) paths.push_back(entry.path.get());
  }
  lost_writes_.fail_incomplete(paths, trouble_);
  open_missing(now);
}

void NicLink::shut(std::function<void()> then) {
  thread_.check("NicLink");
  shutting_ = true;
  usable_.clear();
  std::vector<PathId> ids;
  for (auto& [id, entry] : entries_) ids.push_back(id);
  for (const PathId id : ids) {
    Entry& entry = entries_.at(id);
    const bool closing = std::exchange(entry.state, Entry::State::closing) == Entry::State::closing;
    if (!entry.path || entry.shut) {
      entries_.erase(id);  // a path still being made is dropped later
    } else if (!closing || std::exchange(entry.stopping, false)) {
      begin_shut(entry);
    }
  }
  then_ = std::move(then);
  end_if_shut();
}

void NicLink::end_if_shut() {
  if (entries_.empty() && then_) std::exchange(then_, nullptr)();
}

// --- memory regions --------------------------------------------------------------------------

void NicLink::resolve(const OperationPtr& operation) { regions_.resolve(operation); }

void NicLink::send_region(std::uint64_t key, Errc status, const RemoteRegion& region) {
  kvxfer::send_region(owner_, key, status, region);
}

bool NicLink::has_windows_of(const MemoryRegion& region) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const auto& entry) {
    return entry.second.path && !entry.second.shut && entry.second.path->has_windows_of(region);
  });
}

void NicLink::forget_region(std::uint64_t key) {
  owner_.send_nic_frame(NicFrame::region_gone, ByteWriter().put(key).take());
}

// --- revoking --------------------------------------------------------------------------------

void NicLink::revoke(Imm imm, bool complete) {
  thread_.check("NicLink");
  revoke_here(imm);
  owner_.send_nic_frame(NicFrame::revoke,
                        ByteWriter().put(imm).put(static_cast<std::uint8_t>(complete)).take());
}

void NicLink::revoke_here(Imm imm) {
  for (auto& [id, entry] : entries_) {
    if (entry.path) entry.path->revoke_counter(imm);
  }
}

void NicLink::on_revoke(Imm imm, bool complete) {
  revoked_.add(imm, now_);
  for (auto& [id, entry] : entries_) {
    if (entry.path) entry.path->forget(imm);
  }
  for (const OperationPtr& operation : operations_.with(ends_.peer, imm)) {
    operation->revoked = true;
    if (complete) {
      operation->arrived = true;
    } else if (!operation->arrived) {
      operations_.fail(operation, Errc::stale_counter,
                       refusal(Errc::stale_counter, *operation, ends_.label).text);
    }
  }
  regions_.forget_granted(imm);
  if (complete) return;
  if (std::find(answering_.begin(), answering_.end(), imm) == answering_.end()) {
    answering_.push_back(imm);
  }
  answer_revokes();
}

void NicLink::answer_revokes() {
  std::erase_if(answering_, [this](Imm imm) {
    for (const OperationPtr& operation : operations_.with(ends_.peer, imm)) {
      if (operation->outstanding > 0) return false;
    }
    owner_.send_nic_frame(NicFrame::revoked, ByteWriter().put(imm).take());
    return true;
  });
}

// --- frames ----------------------------------------------------------------------------------

void NicLink::on_credit_due(const NicPath& path) {
  owner_.send_nic_frame(NicFrame::credit,
                        ByteWriter().put(path.identity().id).put(path.consumed()).take());
}

Result<void> NicLink::on_frame(NicFrame type, std::string_view payload, std::uint64_t now) {
  thread_.check("NicLink");
  now_ = now;
  ByteReader reader(payload);
  switch (type) {
    case NicFrame::path_open:
      return on_path_open(reader);
    case NicFrame::path_opened:
      return on_path_opened(reader);
    case NicFrame::path_stop:
      return on_path_stop(reader);
    case NicFrame::path_close:
      return on_path_close(reader);
    case NicFrame::region:
      return regions_.on_region(reader) ? Result<void>() : malformed("region");
    case NicFrame::window:
      return regions_.on_window(reader, [this](PathId id) { return entries_.contains(id); })
                 ? Result<void>()
                 : malformed("window");
    case NicFrame::path_ready: {
      const auto found = entries_.find(reader.get<PathId>());
      if (!reader.finished() || ends_.initiator) return malformed("path_ready");
      if (found == entries_.end()) return {};
      if (found->second.state == Entry::State::closing) return {};
      // A path in another state is not connected yet, or is in use already.
      if (found->second.state != Entry::State::opening) return malformed("path_ready");
      enter_service(found->second);
      return {};
    }
    case NicFrame::nic_state:
      their_usable_ = reader.get<NicMask>() & all_of(ends_.theirs.size());
      retry_now();
      break;
    case NicFrame::resolve:
      owner_.share_region(reader.get<std::uint64_t>());
      break;
    case NicFrame::region_gone:
      regions_.forget(reader.get<std::uint64_t>());
      break;
    case NicFrame::revoke: {
      const auto imm = reader.get<Imm>();
      on_revoke(imm, reader.get<std::uint8_t>() != 0);
      break;
    }
    case NicFrame::revoked: {
      const auto imm = reader.get<Imm>();
      for (auto& [id, entry] : entries_) {
        if (entry.path) entry.path->end_refusal(imm);
      }
      owner_.on_revoked(imm);
      break;
    }
    case NicFrame::credit: {
      const auto found = entries_.find(reader.get<PathId>());
      const auto consumed = reader.get<std::uint64_t>();
      if (found != entries_.end() && found->second.path) found->second.path->add_credit(consumed);
      break;
    }
  }
  if (!reader.finished()) return malformed("frame " + std::to_string(static_cast<int>(type)));
  return {};
}

}  // namespace kvxfer
