#include "moe/memory_layout.hpp"

namespace kvxfer::moe {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kLine = 64;

std::size_t up_to(std::size_t unit, std::size_t bytes) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

std::size_t most_message_bytes(const Shape& shape, std::uint32_t to) {
  const std::size_t entries = std::size_t{shape.max_tokens} * shape.entries_per_row(to);
  return up_to(kLine, sizeof(MessageHead) + routes_bytes(shape.max_tokens, entries));
}

InboxLayout::InboxLayout(const Shape& shape) {
  const std::size_t places = 2 * std::size_t{shape.slots};
  for (std::uint32_t to = 0; to < shape.ranks; ++to) {
    message_of_.push_back(messages_of_place_);
    messages_of_place_ += most_message_bytes(shape, to);
  }
  combine_heads_ = places * messages_of_place_;
  tokens_ = up_to(kPage, combine_heads_ + places * sizeof(MessageHead));
  tokens_of_slot_ = shape.max_tokens * shape.token_row().bytes();
  combine_ = up_to(kPage, tokens_ + shape.slots * tokens_of_slot_);
  combine_of_slot_ = shape.max_tokens * shape.combine_row().bytes();
  bytes_ = up_to(kPage, combine_ + shape.slots * combine_of_slot_);
}

std::vector<std::pair<std::string, std::uint64_t>> InboxLayout::parts() const {
  return {
      {"routes", tokens_}, {"token rows", combine_ - tokens_}, {"combine rows", bytes_ - combine_}};
}

OwnLayout::OwnLayout(const Shape& shape) {
  words_ = sizeof(OwnHead);
  words_of_slot_ = (2 + 2 * std::size_t{shape.ranks}) * sizeof(Word);
  messages_ = up_to(kPage, words_ + shape.slots * words_of_slot_);
  for (std::uint32_t to = 0; to < shape.ranks; ++to) {
    message_of_.push_back(messages_of_slot_);
    messages_of_slot_ += most_message_bytes(shape, to);
  }
  const std::size_t heads = std::size_t{shape.slots} * shape.ranks * sizeof(MessageHead);
  combine_heads_ = messages_ + shape.slots * messages_of_slot_;
  relay_heads_ = combine_heads_ + heads;
  tokens_ = up_to(kPage, relay_heads_ + heads);
  tokens_of_slot_ = shape.max_tokens * shape.token_row().bytes();
  combine_ = up_to(kPage, tokens_ + shape.slots * tokens_of_slot_);
  combine_row_ = shape.combine_row().bytes();
  combine_of_slot_ = shape.combine_rows() * combine_row_;
  inboxes_ = up_to(kHugePage, combine_ + shape.slots * combine_of_slot_);
  inbox_bytes_ = up_to(kHugePage, InboxLayout(shape).bytes());
}

std::vector<std::pair<std::string, std::uint64_t>> OwnLayout::parts() const {
  return {{"routes", tokens_},
          {"token rows", combine_ - tokens_},
          {"combine rows", inboxes_ - combine_}};
}

}  // namespace kvxfer::moe
