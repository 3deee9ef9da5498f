#include "moe/memory_layout.hpp"

namespace kvxfer::moe {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kLine = 64;

std::size_t up_to(std::size_t unit, std::size_t bytes) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

std::size_t most_message_bytes(const Shape& shape, std::uint32_t to) {
  const std::size_t entries = std::size_t{shape.max_tokens} * shape.entries_per_row(to);
  return up_to(kLine, sizeof(MessageHead) + routes_bytes(shape.max_tokens, entries));
}

OwnLayout::OwnLayout(const Shape& shape) {
  words_ = sizeof(OwnHead);
  words_of_slot_ = (2 + std::size_t{shape.ranks}) * sizeof(Word);
  messages_ = up_to(kPage, words_ + shape.slots * words_of_slot_);
  for (std::uint32_t to = 0; to < shape.ranks; ++to) {
    message_of_.push_back(messages_of_slot_);
    messages_of_slot_ += most_message_bytes(shape, to);
  }
  combine_heads_ = messages_ + shape.slots * messages_of_slot_;
  tokens_ =
      up_to(kPage, combine_heads_ + std::size_t{shape.slots} * shape.ranks * sizeof(MessageHead));
  tokens_of_slot_ = shape.max_tokens * shape.token_row().bytes();
  combine_ = up_to(kPage, tokens_ + shape.slots * tokens_of_slot_);
  combine_row_ = shape.combine_row().bytes();
  combine_of_slot_ = shape.combine_rows() * combine_row_;
  bytes_ = combine_ + shape.slots * combine_of_slot_;
}

std::vector<std::pair<std::string, std::uint64_t>> OwnLayout::parts() const {
  return {
      {"routes", tokens_}, {"token rows", combine_ - tokens_}, {"combine rows", bytes_ - combine_}};
}

InboxLayout::InboxLayout(const Shape& shape, std::uint32_t at) {
  const std::size_t places = 2 * std::size_t{shape.slots};
  message_ = most_message_bytes(shape, at);
  combine_heads_ = places * message_;
  tokens_ = up_to(kPage, combine_heads_ + places * sizeof(MessageHead));
  tokens_of_slot_ = shape.max_tokens * shape.token_row().bytes();
  combine_ = up_to(kPage, tokens_ + shape.slots * tokens_of_slot_);
  combine_of_slot_ = shape.max_tokens * shape.combine_row().bytes();
  bytes_ = combine_ + shape.slots * combine_of_slot_;
}

std::vector<std::pair<std::string, std::uint64_t>> InboxLayout::parts() const {
  return {
      {"routes", tokens_}, {"token rows", combine_ - tokens_}, {"combine rows", bytes_ - combine_}};
}

}  // namespace kvxfer::moe
