// Order between the engine and streams of others on a GPU: words in pinned host memory, which a
// stream writes and the engine watches, or the other way round. Neither waits for the other on a
// processor. Any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "cuda/driver.hpp"
#include "kvxfer/types.hpp"

namespace kvxfer::cuda {

class Gpu;

using Word = std::atomic<std::uint64_t>;
static_assert(sizeof(WatchWord) == 64);

// Words, each with a cache line to itself. They keep their values from use to use. One that streams
// are still to count up is not used again before they have.
class Words {
 public:
  // Of zeroes.
  explicit Words(std::span<WatchWord> words);

  // Null where all are in use.
  WatchWord* take();
  // `last`: the value that it will have at last.
  void give_back(WatchWord* word, std::uint64_t last);
  void give_back(WatchWord* word) { give_back(word, word->value.load()); }

 private:
  struct Free {
    WatchWord* word;
    std::uint64_t last;
  };
  std::mutex mutex_;
  std::vector<Free> free_;
};

// The count is kept on the GPU, where it may be added to by any work; each sum is then stored. One
// that a graph adds to must outlive the graph.
class CountedWord final : public StreamWord, public std::enable_shared_from_this<CountedWord> {
 public:
  static Result<std::shared_ptr<StreamWord>> create(std::shared_ptr<Gpu> gpu);
  ~CountedWord() override;
  CountedWord(const CountedWord&) = delete;
  CountedWord& operator=(const CountedWord&) = delete;

  Result<void> add_on(void* stream, std::uint64_t by) override;
  std::shared_ptr<const WatchWord> word() const override { return {shared_from_this(), word_}; }

 private:
  CountedWord(std::shared_ptr<Gpu> gpu, WatchWord* word) : gpu_(std::move(gpu)), word_(word) {}

  std::shared_ptr<Gpu> gpu_;
  WatchWord* word_;
  std::mutex mutex_;  // guards what follows
  std::uint64_t added_ = 0;
  bool in_graph_ = false;
};

// The engine writes it, kernels read it; what NICs wrote has been flushed before.
class MirroredCount final : public CounterMirror {
 public:
  static Result<std::shared_ptr<MirroredCount>> create(std::shared_ptr<Gpu> gpu);
  ~MirroredCount() override;
  MirroredCount(const MirroredCount&) = delete;
  MirroredCount& operator=(const MirroredCount&) = delete;

  void set(std::uint64_t count);
  // Of the counter; the last.
  void end(Errc code);
  const Word& word() const override { return word_->value; }

 private:
  MirroredCount(std::shared_ptr<Gpu> gpu, WatchWord* word) : gpu_(std::move(gpu)), word_(word) {}

  std::shared_ptr<Gpu> gpu_;
  WatchWord* word_;
};

// The word's upper bits number its uses, and only grow: a stream that gets to an old wait late
// passes it. The lowest byte is 0 until this ends, then 1, and the code of the error that ended it
// added.
class QueuedWait final : public StreamWait {
 public:
  // Queues the wait. The caller must end it.
  static Result<std::shared_ptr<QueuedWait>> queue(std::shared_ptr<Gpu> gpu, void* stream);
  ~QueuedWait() override;
  QueuedWait(const QueuedWait&) = delete;
  QueuedWait& operator=(const QueuedWait&) = delete;

  // Once.
  void end(const std::optional<Error>& error);
  Result<bool> reached() const override;
  const Word& word() const override { return word_->value; }

 private:
  QueuedWait(std::shared_ptr<Gpu> gpu, WatchWord* word) : gpu_(std::move(gpu)), word_(word) {}

  std::shared_ptr<Gpu> gpu_;
  WatchWord* word_;
  std::uint64_t use_ = 0;
  std::optional<Error> error_;  // written before the word
};

}  // namespace kvxfer::cuda
