#include "cuda/stream_order.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/gpu.hpp"

namespace kvxfer::cuda {
namespace {

constexpr unsigned kCodeBits = 8;
static_assert(kErrcs < 1u << kCodeBits);

Error no_words(const Gpu& gpu, const char* what) {
  return {Errc::backpressure, "all " + std::to_string(Gpu::kWords) + " words of " + gpu.label() +
                                  " for " + what + " are in use; drop those that have ended"};
}

}  // namespace

Words::Words(std::span<WatchWord> words) {
  for (WatchWord& word : words) free_.push_back({&word, 0});
}

WatchWord* Words::take() {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(free_.rbegin(), free_.rend(), [](const Free& free) {
    return free.word->value.load(std::memory_order_acquire) == free.last;
  });
  if (found == free_.rend()) return nullptr;
  WatchWord* const word = found->word;
  free_.erase(std::next(found).base());
  return word;
}

void Words::give_back(WatchWord* word, std::uint64_t last) {
  const std::lock_guard lock(mutex_);
  free_.push_back({word, last});
}

// --- a stream counts -------------------------------------------------------------------------

Result<std::shared_ptr<StreamWord>> CountedWord::create(std::shared_ptr<Gpu> gpu) {
  WatchWord* const word = gpu->counted_words().take();
  if (!word) return no_words(*gpu, "watchers and mirrors");
  word->value.store(0, std::memory_order_relaxed);
  std::shared_ptr<CountedWord> made(new CountedWord(std::move(gpu), word));
  if (auto good = made->gpu_->reset(made->gpu_->counter_of(*word)); !good) return good.error();
  return std::shared_ptr<StreamWord>(std::move(made));
}

// It is unknown how often a graph adds, so a word that one adds to is not reused.
CountedWord::~CountedWord() {
  if (!in_graph_) gpu_->counted_words().give_back(word_, added_);
}

Result<void> CountedWord::add_on(void* stream, std::uint64_t by) {
  auto* const on = static_cast<StreamHandle>(stream);
  const std::lock_guard lock(mutex_);
  const bool in_graph = gpu_->capturing(on);
  auto queued = gpu_->count_on(on, {.counter = gpu_->counter_of(*word_),
                                    .word = reinterpret_cast<std::uint64_t>(&word_->value),
                                    .by = by});
  if (queued && !in_graph) added_ += by;
  in_graph_ = in_graph_ || in_graph;
  return queued;
}

// --- a kernel reads --------------------------------------------------------------------------

// Takes one of the counted words, as the others only grow.
Result<std::shared_ptr<MirroredCount>> MirroredCount::create(std::shared_ptr<Gpu> gpu) {
  gpu->await_frees();
  WatchWord* const word = gpu->counted_words().take();
  if (!word) return no_words(*gpu, "watchers and mirrors");
  word->value.store(0, std::memory_order_relaxed);
  return std::shared_ptr<MirroredCount>(new MirroredCount(std::move(gpu), word));
}

MirroredCount::~MirroredCount() { gpu_->counted_words().give_back(word_); }

void MirroredCount::set(std::uint64_t count) {
  word_->value.store(count << kCodeBits, std::memory_order_release);
}

void MirroredCount::end(Errc code) {
  const std::uint64_t count = word_->value.load(std::memory_order_relaxed) >> kCodeBits;
  word_->value.store(count << kCodeBits | (1 + static_cast<std::uint64_t>(code)),
                     std::memory_order_release);
}

// --- a stream waits --------------------------------------------------------------------------

Result<std::shared_ptr<QueuedWait>> QueuedWait::queue(std::shared_ptr<Gpu> gpu, void* stream) {
  gpu->await_frees();
  WatchWord* const word = gpu->awaited_words().take();
  if (!word) return no_words(*gpu, "waits of streams");
  std::shared_ptr<QueuedWait> made(new QueuedWait(std::move(gpu), word));
  made->use_ = (word->value.load(std::memory_order_relaxed) >> kCodeBits) + 1;
  const auto queued = made->gpu_->wait_on(static_cast<StreamHandle>(stream), word->value,
                                          made->use_ << kCodeBits | 1);
  if (!queued) return queued.error();
  return made;
}

QueuedWait::~QueuedWait() { gpu_->awaited_words().give_back(word_); }

void QueuedWait::end(const std::optional<Error>& error) {
  error_ = error;
  const std::uint64_t code = error ? static_cast<std::uint64_t>(error->code) : 0;
  word_->value.store(use_ << kCodeBits | (1 + code), std::memory_order_release);
}

Result<bool> QueuedWait::reached() const {
  const std::uint64_t now = word_->value.load(std::memory_order_acquire);
  if (now >> kCodeBits != use_) return false;
  if (error_) return *error_;
  return true;
}

}  // namespace kvxfer::cuda
