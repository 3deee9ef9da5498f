// Order between the engine and other users' streams on a GPU: words in pinned host memory, which a
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

// Words, each alone in a cache line. They keep their values from use to use. A word that streams
// are still to count up is not reused before they have.
class Words {
 public:
  // Takes words that are zero.
  explicit Words(std::span<WatchWord> words);

  // Returns null if all are in use.
  WatchWord* take();
  // `last`: the final value of the word.
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

// A count that is kept on the GPU, where any work may add to it; each sum is then stored in the
// word. One that a graph adds to must outlive the graph.
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

// A count that the engine writes and kernels read; what NICs wrote has been flushed before.
class MirroredCount final : public CounterMirror {
 public:
  static Result<std::shared_ptr<MirroredCount>> create(std::shared_ptr<Gpu> gpu);
  ~MirroredCount() override;
  MirroredCount(const MirroredCount&) = delete;
  MirroredCount& operator=(const MirroredCount&) = delete;

  void set(std::uint64_t count);
  // Marks the end of the counter. Must be the last call.
  void end(Errc code);
  const Word& word() const override { return word_->value; }

 private:
  MirroredCount(std::shared_ptr<Gpu> gpu, WatchWord* word) : gpu_(std::move(gpu)), word_(word) {}

  std::shared_ptr<Gpu> gpu_;
  WatchWord* word_;
};

// A queued wait. The word's upper bits number its uses, and only grow: a stream that gets to an old
// wait late passes it. Once this use has ended, the lowest byte is 1 plus the code of the error
// that ended it, if any.
class QueuedWait final : public StreamWait {
 public:
  // Queues the wait. The caller must end it.
  static Result<std::shared_ptr<QueuedWait>> queue(std::shared_ptr<Gpu> gpu, void* stream);
  ~QueuedWait() override;
  QueuedWait(const QueuedWait&) = delete;
  QueuedWait& operator=(const QueuedWait&) = delete;

  // Must be called once.
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
