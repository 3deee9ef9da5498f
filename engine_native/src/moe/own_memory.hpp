// The memory of this rank that others read, and its doorbell.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fd.hpp"
#include "kvxfer/engine.hpp"
#include "memory_order.hpp"
#include "moe/memory_layout.hpp"
#include "shared_memory.hpp"

namespace kvxfer::moe {

class OwnMemory {
 public:
  static Result<OwnMemory> create(const Shape& shape);
  ~OwnMemory();
  OwnMemory(OwnMemory&&) = default;
  OwnMemory& operator=(OwnMemory&&) = default;

  // Returns the number of a free inbox, which has memory now. Fails with out-of-memory.
  Result<std::size_t> take_inbox();
  void give_inbox(std::size_t number) {
    assert(taken_[number]);
    taken_[number] = false;
  }

  const OwnLayout& layout() const { return layout_; }
  std::byte* at(std::size_t offset) const { return memory_->bytes().data() + offset; }
  Word& word(std::size_t offset) const { return *reinterpret_cast<Word*>(at(offset)); }
  MessageHead& head(std::size_t offset) const {
    return *reinterpret_cast<MessageHead*>(at(offset));
  }
  // The bytes without the inboxes.
  std::span<std::byte> own_bytes() const { return memory_->bytes().first(layout_.own_bytes()); }
  std::span<std::byte> inbox(std::size_t number) const {
    return memory_->bytes().subspan(layout_.inbox(number), layout_.inbox_bytes());
  }
  int memory_fd() const { return memory_->memfd(); }
  int doorbell_fd() const { return doorbell_.get(); }

  // Publishes what the word stands for. Ring the doorbells of ranks that may sleep after it.
  void publish(std::size_t word_offset, std::uint64_t key) const {
    word(word_offset).value.store(key, std::memory_order_seq_cst);
  }
  // Must come before writing to what the word stands for: a reader that has read any of that sees
  // the word withdrawn when it looks again, behind order_reads().
  void withdraw(std::size_t word_offset) const {
    word(word_offset).value.store(0, std::memory_order_relaxed);
    order_stores();
  }

  // Sleeps until `event_fd` is readable or the doorbell rings, unless `ready`. For `timeout_ms` see
  // poll().
  template <class Ready>
  void sleep(int event_fd, int timeout_ms, const Ready& ready) const {
    head_sleeping().value.store(1, std::memory_order_seq_cst);
    if (!ready()) poll(event_fd, timeout_ms);
    head_sleeping().value.store(0, std::memory_order_seq_cst);
  }

 private:
  OwnMemory(const Shape& shape, SharedMemoryPtr memory, UniqueFd doorbell);
  Word& head_sleeping() const { return reinterpret_cast<OwnHead*>(at(0))->sleeping; }
  void poll(int event_fd, int timeout_ms) const;

  OwnLayout layout_;
  SharedMemoryPtr memory_;
  UniqueFd doorbell_;
  std::vector<bool> taken_;  // by inbox
};

}  // namespace kvxfer::moe
