#include "moe/engine_way.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "memory_region.hpp"

namespace kvxfer::moe {
namespace {

// A write of at most this length is not split, and has one immediate.
constexpr std::size_t kOneWrite = std::size_t{1} << 20;

struct TermsHead {
  static constexpr std::uint64_t kMagic = 0x6b76786665725431;  // includes the version
  std::uint64_t magic;
  std::uint64_t digest;  // the shape's
  std::uint32_t from;
  std::uint32_t to;
};

template <class T>
void append(std::string& text, const T& value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class T>
T take(std::string_view& text) {
  T value;
  text.copy(reinterpret_cast<char*>(&value), sizeof value);
  text.remove_prefix(sizeof value);
  return value;
}

}  // namespace

Result<std::unique_ptr<EngineWay>> EngineWay::open(TransferEngine& engine, const Shape& shape,
                                                   std::uint32_t to, PeerId peer, OwnMemory& own,
                                                   Duration timeout) {
  std::unique_ptr<EngineWay> way(new EngineWay(engine, shape, to, peer, own, timeout));
  const auto number = own.take_inbox();
  if (!number) return number.error();
  way->inbox_number_ = *number;
  const std::span<std::byte> memory = own.inbox(*number);
  auto inbox = engine.register_memory(memory.data(), memory.size());
  if (!inbox) return inbox.error();
  way->inbox_ = std::move(*inbox);
  for (auto& directions : way->lanes_) {
    for (Lane& lane : directions) {
      for (Imm* const imm : {&lane.here.data, &lane.here.heads}) {
        const auto counter = engine.allocate_counter(peer);
        if (!counter) return counter.error();
        *imm = *counter;
      }
      if (auto good = engine.subscribe(lane.here.heads); !good) return good.error();
    }
  }
  return way;
}

EngineWay::EngineWay(TransferEngine& engine, const Shape& shape, std::uint32_t to, PeerId peer,
                     OwnMemory& own, Duration timeout)
    : engine_(engine),
      shape_(shape),
      to_(to),
      peer_(peer),
      own_(own),
      timeout_(timeout),
      layout_(shape),
      lanes_(shape.slots) {}

EngineWay::~EngineWay() {
  for (const auto& directions : lanes_) {
    for (const Lane& lane : directions) {
      for (const Imm imm : {lane.here.data, lane.here.heads}) {
        if (imm != 0) engine_.release_counter(imm);
      }
    }
  }
  // Fails if the engine is closed: then nothing lands either.
  if (inbox_) [[maybe_unused]]
    const auto given_back = engine_.deregister(inbox_);
  if (inbox_number_) own_.give_inbox(*inbox_number_);
}

std::string EngineWay::terms() const {
  std::string text;
  append(text,
         TermsHead{
             .magic = TermsHead::kMagic, .digest = digest(shape_), .from = shape_.rank, .to = to_});
  for (const auto& directions : lanes_) {
    for (const Lane& lane : directions) append(text, lane.here);
  }
  return text + inbox_->descriptor().encode();
}

Result<void> EngineWay::accept(std::string_view terms, RegionPtr own) {
  const auto refuse = [&](const std::string& why) {
    return Error{Errc::protocol_error, "the terms of rank " + std::to_string(to_) + " " + why};
  };
  const std::size_t counters = shape_.slots * kDirections * sizeof(Counters);
  if (terms.size() != sizeof(TermsHead) + counters + MrDescriptor::kBytes) {
    return refuse("have " + std::to_string(terms.size()) +
                  " bytes; start all ranks with the same shape and version");
  }
  const auto head = take<TermsHead>(terms);
  if (head.magic != TermsHead::kMagic || head.digest != digest(shape_)) {
    return refuse("are of another shape or version; start all ranks with the same");
  }
  if (head.from != to_ || head.to != shape_.rank) {
    return refuse("are those of rank " + std::to_string(head.from) + " for rank " +
                  std::to_string(head.to));
  }
  for (auto& directions : lanes_) {
    for (Lane& lane : directions) lane.there = take<Counters>(terms);
  }
  const auto inbox = MrDescriptor::decode(terms);
  if (!inbox) return refuse("have a bad descriptor: " + inbox.error().text);
  if (inbox->length < layout_.bytes()) return refuse("offer too small an inbox");
  inbox_there_ = *inbox;
  own_region_ = std::move(own);
  return {};
}

bool EngineWay::arrived(Imm imm) {
  for (auto& directions : lanes_) {
    for (Lane& lane : directions) {
      if (imm != lane.here.heads && imm != lane.here.data) continue;
      lane.fresh = true;
      return true;
    }
  }
  return false;
}

// --- sending ---------------------------------------------------------------------------------

Result<void> EngineWay::sent(Lane& lane, const Result<Submitted>& submitted,
                             std::vector<OperationId>& operations) {
  if (!submitted) return submitted.error();
  lane.data += submitted->immediates;
  operations.push_back(submitted->id);
  return {};
}

Result<void> EngineWay::post_message(Lane& lane, std::size_t offset, std::size_t to,
                                     std::size_t bytes, std::vector<OperationId>& operations) {
  const std::size_t first = std::min(bytes, kOneWrite);
  if (bytes > first) {
    const SingleWrite rest{offset + first, to + first, bytes - first};
    if (auto good = sent(lane,
                         engine_.write(peer_, own_region_, *inbox_there_, rest,
                                       {.imm = lane.there.data, .timeout = timeout_}),
                         operations);
        !good) {
      return good;
    }
  }
  MessageHead& sealed = own_.head(offset);
  sealed.ordinal = ++lane.messages;
  sealed.data = lane.data;
  sealed.check = sealed.seal();
  constexpr std::int64_t kPage = 0;
  const PagedWrite head{.page_length = first,
                        .source_pages = {&kPage, 1},
                        .destination_pages = {&kPage, 1},
                        .source_offset = offset,
                        .destination_offset = to};
  const auto submitted = engine_.write_pages(peer_, own_region_, *inbox_there_, head,
                                             {.imm = lane.there.heads, .timeout = timeout_});
  if (!submitted) return submitted.error();
  operations.push_back(submitted->id);
  lane.fresh = true;  // an answer may be here already
  return {};
}

std::size_t EngineWay::dispatch_bytes(std::uint32_t slot, std::uint32_t to) const {
  const MessageHead& head = own_.head(own_.layout().message(slot, to));
  return std::min(sizeof head + routes_bytes(head.rows, head.entries),
                  most_message_bytes(shape_, to));
}

Result<void> EngineWay::post_dispatch(std::uint32_t slot, const Cargo& cargo,
                                      std::vector<OperationId>& operations) {
  Lane& lane = this->lane(slot, Direction::dispatch);
  const OwnLayout& own = own_.layout();
  const auto post = [&](const auto& submitted) { return sent(lane, submitted, operations); };
  const WriteOptions options{.imm = lane.there.data, .timeout = timeout_};
  if (!cargo.tokens.empty()) {
    const std::size_t row = shape_.token_row().bytes();
    const PagedWrite rows{.page_length = row,
                          .source_pages = cargo.tokens,
                          .destination_pages = cargo.tokens,
                          .source_stride = row,
                          .destination_stride = row,
                          .source_offset = own.tokens(slot),
                          .destination_offset = layout_.tokens(slot)};
    const auto submitted = engine_.write_pages(peer_, own_region_, *inbox_there_, rows, options);
    if (auto good = post(submitted); !good) return good;
  }
  const std::uint64_t ordinal = next_ordinal(lane);
  for (const std::uint32_t rank : cargo.neighbours) {
    const std::size_t message = own.message(slot, rank);
    const SingleWrite all{message, layout_.message(slot, ordinal, rank),
                          dispatch_bytes(slot, rank)};
    const auto submitted = engine_.write(peer_, own_region_, *inbox_there_, all, options);
    if (auto good = post(submitted); !good) return good;
  }
  const std::size_t message = own.message(slot, to_);
  return post_message(lane, message, layout_.message(slot, ordinal, to_), dispatch_bytes(slot, to_),
                      operations);
}

Result<void> EngineWay::post_combine(std::uint32_t slot, std::uint32_t rows,
                                     std::vector<OperationId>& operations) {
  Lane& lane = this->lane(slot, Direction::combine);
  const std::size_t head = own_.layout().combine_head(slot, to_);
  if (rows > 0) {
    const SingleWrite all{own_.layout().combine(slot, own_.head(head).place), layout_.combine(slot),
                          rows * shape_.combine_row().bytes()};
    if (auto good = sent(lane,
                         engine_.write(peer_, own_region_, *inbox_there_, all,
                                       {.imm = lane.there.data, .timeout = timeout_}),
                         operations);
        !good) {
      return good;
    }
  }
  return post_message(lane, head, layout_.combine_head(slot, next_ordinal(lane)),
                      sizeof(MessageHead), operations);
}

// --- receiving -------------------------------------------------------------------------------

const std::byte* EngineWay::inbox(std::size_t offset) const { return inbox_->host() + offset; }

Held EngineWay::look(std::uint32_t slot, Direction direction, std::uint64_t key,
                     MessageHead& head) {
  Lane& lane = this->lane(slot, direction);
  if (!std::exchange(lane.fresh, false)) return Held::nothing;
  // A message is posted once the one before has been placed, so the count is the ordinal of one
  // that is here. A NIC may have placed, or be placing, later ones that are not counted yet: they
  // are read once they are.
  const std::uint64_t newest = engine_.take_arrivals(lane.here.heads);
  if (newest == 0) return Held::nothing;
  const std::size_t message = direction == Direction::dispatch
                                  ? layout_.message(slot, newest, shape_.rank)
                                  : layout_.combine_head(slot, newest);
  std::memcpy(static_cast<void*>(&head), inbox(message), sizeof head);
  if (head.key != key || head.check != head.seal() || head.ordinal > newest) return Held::nothing;
  if (head.ordinal < newest) return Held::malformed;
  if (engine_.counter_value(lane.here.data) < head.data) {
    if (std::exchange(lane.expected, head.data) != head.data) {
      // A completion follows. Fails only while the way is being taken down.
      [[maybe_unused]] const auto expecting =
          engine_.expect(lane.here.data, head.data, Expect::at_least);
    }
    return Held::nothing;
  }
  lane.ordinal = newest;
  return Held::whole;
}

Held EngineWay::dispatched(std::uint32_t slot, std::uint64_t key) {
  MessageHead head{};
  return look(slot, Direction::dispatch, key, head);
}

Held EngineWay::read_routes(std::uint32_t slot, std::uint64_t /*key*/, Routes& routes) {
  const std::byte* const message = inbox(layout_.message(slot, ordinal(slot), shape_.rank));
  MessageHead head{};
  std::memcpy(static_cast<void*>(&head), message, sizeof head);
  const bool good =
      moe::read_routes(shape_, shape_.rank, head.rows, head.entries, message + sizeof head, routes);
  return good ? Held::routes : Held::malformed;
}

const std::byte* EngineWay::tokens(std::uint32_t slot) const { return inbox(layout_.tokens(slot)); }

Held EngineWay::combined(std::uint32_t slot, std::uint64_t key, std::uint32_t rows) {
  MessageHead head{};
  const Held held = look(slot, Direction::combine, key, head);
  return held == Held::whole && head.rows != rows ? Held::malformed : held;
}

const std::byte* EngineWay::combine_rows(std::uint32_t slot) const {
  return inbox(layout_.combine(slot));
}

// A lost peer writes no more, and a live one waits for this rank.
bool EngineWay::still(std::uint32_t /*slot*/, Direction /*direction*/,
                      std::uint64_t /*key*/) const {
  return true;
}

}  // namespace kvxfer::moe
