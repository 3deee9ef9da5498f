// The layout of own memory, which a rank shares with those on its host and sends from. Its inboxes
// are in it, too: another rank writes each by the engine.
//
// The rest of own memory is written by its rank alone. Others that map it read a key, copy what the
// key stands for, and read the key again: the copy counts only if both are the key that they want.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moe/routing.hpp"
#include "moe/shape.hpp"

namespace kvxfer::moe {

// A word that others wait for, alone in a cache line.
struct alignas(64) Word {
  std::atomic<std::uint64_t> value;
};
static_assert(sizeof(Word) == 64 && std::atomic<std::uint64_t>::is_always_lock_free);

// The start of own memory.
struct OwnHead {
  static constexpr std::uint64_t kMagic = 0x6b76786665724d31;  // includes the version
  std::uint64_t magic;
  std::uint64_t digest;  // the shape's
  std::uint64_t rank;
  // If not 0, a rank that changes a word that this one may wait for rings its doorbell.
  // Sequentially consistent, as words are: either a sleeper sees the new key, or it is seen asleep.
  Word sleeping;
};

// The start of a message. In a dispatch, the rows follow, then the entries of routes; in a combine,
// nothing. A relay head says where the message of a rank of another host is.
struct alignas(64) MessageHead {
  std::uint64_t key;
  std::uint32_t rows;
  std::uint32_t entries;
  // In messages that the engine takes: the message's number between these two ranks, in this slot
  // and direction, from 1 on; and the number of data immediates of all messages so far.
  std::uint64_t ordinal;
  std::uint64_t data;
  // In a combine in own memory: the number of the message's first row among the slot's combine
  // rows. In a relay head: the number of the inbox.
  std::uint64_t place;
  std::uint64_t check;  // seal(), which a half-written head does not have

  std::uint64_t seal() const {
    std::uint64_t hash = ordinal;
    for (const std::uint64_t word : {key, std::uint64_t{rows} << 32 | entries, data}) {
      hash = (hash ^ word) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 32;
    }
    return hash;
  }
};
static_assert(sizeof(MessageHead) == 64);

enum class Direction : std::uint8_t { dispatch, combine };
inline constexpr std::size_t kDirections = 2;

// Returns the maximum size of a dispatch message to rank `to`, in bytes.
std::size_t most_message_bytes(const Shape& shape, std::uint32_t to);

// The layout of an inbox: what one rank writes by the engine to another one, and to the ranks of
// that one's host. A message has two places, by the parity of its ordinal, so that the next one, of
// another view, does not overwrite one that is still read. All offsets are bytes.
class InboxLayout {
 public:
  explicit InboxLayout(const Shape& shape);

  // Returns the offset of a dispatch message to rank `to`.
  std::size_t message(std::uint32_t slot, std::uint64_t ordinal, std::uint32_t to) const {
    return place(slot, ordinal) * messages_of_place_ + message_of_[to];
  }
  std::size_t combine_head(std::uint32_t slot, std::uint64_t ordinal) const {
    return combine_heads_ + place(slot, ordinal) * sizeof(MessageHead);
  }
  std::size_t tokens(std::uint32_t slot) const { return tokens_ + slot * tokens_of_slot_; }
  std::size_t combine(std::uint32_t slot) const { return combine_ + slot * combine_of_slot_; }
  std::size_t bytes() const { return bytes_; }
  std::vector<std::pair<std::string, std::uint64_t>> parts() const;

 private:
  static std::size_t place(std::uint32_t slot, std::uint64_t ordinal) {
    return 2 * std::size_t{slot} + ordinal % 2;
  }

  std::vector<std::size_t> message_of_;  // by rank
  std::size_t messages_of_place_ = 0;
  std::size_t combine_heads_ = 0;
  std::size_t tokens_ = 0;
  std::size_t tokens_of_slot_ = 0;
  std::size_t combine_ = 0;
  std::size_t combine_of_slot_ = 0;
  std::size_t bytes_ = 0;
};

// The layout of own memory. All offsets are bytes.
class OwnLayout {
 public:
  explicit OwnLayout(const Shape& shape);

  // Words that say: routes to all are here; token rows, too; combine rows for one rank are; a
  // dispatch of a rank of another host is in an inbox here, for all ranks of this host.
  std::size_t routes_word(std::uint32_t slot) const { return words_ + slot * words_of_slot_; }
  std::size_t rows_word(std::uint32_t slot) const { return routes_word(slot) + sizeof(Word); }
  std::size_t combine_word(std::uint32_t slot, std::uint32_t to) const {
    return routes_word(slot) + (2 + to) * sizeof(Word);
  }
  std::size_t relay_word(std::uint32_t slot, std::uint32_t from) const {
    return routes_word(slot) + (2 + message_of_.size() + from) * sizeof(Word);
  }
  std::size_t message(std::uint32_t slot, std::uint32_t to) const {
    return messages_ + slot * messages_of_slot_ + message_of_[to];
  }
  std::size_t combine_head(std::uint32_t slot, std::uint32_t to) const {
    return combine_heads_ + (std::size_t{slot} * message_of_.size() + to) * sizeof(MessageHead);
  }
  std::size_t relay_head(std::uint32_t slot, std::uint32_t from) const {
    return relay_heads_ + (std::size_t{slot} * message_of_.size() + from) * sizeof(MessageHead);
  }
  // max_tokens rows, by token.
  std::size_t tokens(std::uint32_t slot) const { return tokens_ + slot * tokens_of_slot_; }
  // max_tokens rows for each rank, by row of its routes: for rank r from row r * max_tokens on, or
  // where the combine head says.
  std::size_t combine(std::uint32_t slot, std::size_t row) const {
    return combine_ + slot * combine_of_slot_ + row * combine_row_;
  }
  // The bytes that this rank writes itself; then come the inboxes.
  std::size_t own_bytes() const { return inboxes_; }
  // Twice the other ranks: a step may still read the inbox of a rank that has come back.
  std::size_t inboxes() const { return 2 * (message_of_.size() - 1); }
  std::size_t inbox_bytes() const { return inbox_bytes_; }
  std::size_t inbox(std::size_t number) const { return inboxes_ + number * inbox_bytes_; }
  std::size_t bytes() const { return inbox(inboxes()); }
  std::vector<std::pair<std::string, std::uint64_t>> parts() const;

 private:
  std::size_t words_ = 0;
  std::size_t words_of_slot_ = 0;
  std::size_t messages_ = 0;
  std::size_t messages_of_slot_ = 0;
  std::vector<std::size_t> message_of_;  // by rank
  std::size_t combine_heads_ = 0;
  std::size_t relay_heads_ = 0;
  std::size_t tokens_ = 0;
  std::size_t tokens_of_slot_ = 0;
  std::size_t combine_ = 0;
  std::size_t combine_of_slot_ = 0;
  std::size_t combine_row_ = 0;
  std::size_t inboxes_ = 0;
  std::size_t inbox_bytes_ = 0;
};

}  // namespace kvxfer::moe
